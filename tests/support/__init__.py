"""What several test packages share; nothing in here is a test."""
