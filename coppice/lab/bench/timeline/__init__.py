"""Where the time of a round goes, hop by hop, from events that the services kept."""
