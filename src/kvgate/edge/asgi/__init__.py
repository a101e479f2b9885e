"""Admission inside an ASGI server. Start at `middleware`; the public name is `kvgate.asgi`."""
