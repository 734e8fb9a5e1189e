"""Images with boxes and masks, or with a map of labels."""
