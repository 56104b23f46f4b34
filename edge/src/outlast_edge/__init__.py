"""outlast-edge."""
