"""Public: admission in front of your own ASGI application (docs/asgi.md). The code is in `edge.asgi`."""

from kvgate.edge.asgi.middleware import AdmissionMiddleware
from kvgate.edge.asgi.routes import DIALECTS, fields
from kvgate.edge.asgi.workers import SeveralWorkers

__all__ = ["DIALECTS", "AdmissionMiddleware", "SeveralWorkers", "fields"]
