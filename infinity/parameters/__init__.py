"""What a model consists of: its parameters as records, and what memory they share."""
