"""The pools behind the gateway: what they are, how they are found out, which of them gets a request."""
