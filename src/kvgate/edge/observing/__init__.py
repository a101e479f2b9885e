"""What the gateway shows of itself, and what it costs to look."""
