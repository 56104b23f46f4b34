"""outlast."""
