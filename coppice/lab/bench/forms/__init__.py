"""The forms that one deployment can have, side by side: what shows whether asynchronous rounds pay."""
