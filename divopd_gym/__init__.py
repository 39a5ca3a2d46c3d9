"""Text environments as true Gymnasium environments; importing this registers their ids."""
