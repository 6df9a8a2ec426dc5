"""Results as a table, a picture and JSON."""
