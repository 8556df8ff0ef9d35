"""Where the data comes from."""
