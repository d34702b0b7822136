"""Number formats, rounding and scales; imports nothing else of maxlp."""
