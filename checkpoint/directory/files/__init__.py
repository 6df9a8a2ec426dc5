"""Files and directories that are made, replaced or asked for room, whatever is in them."""
