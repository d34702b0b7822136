"""What a trained model is measured by, one file a measure."""
