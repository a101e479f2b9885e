"""The gate around your own generate call. Start at `admission`; the public names are in `kvgate`."""
