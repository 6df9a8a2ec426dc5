"""AdamW's state of other libraries: taken over into a checkpoint of ours, and given back."""
