"""The time of a round, hop by hop, from events that the services kept."""
