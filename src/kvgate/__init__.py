"""kvgate: admission control for self-hosted LLM servers.

The names below are the public API of the library; `kvgate.asgi` and `kvgate.vllm` are the middlewares.
This door opens the core and the two small shells around it (`edge.controller`, `edge.admission`),
which need the standard library alone: no server, no tokenizer, no event loop comes in with it.
"""

from kvgate.core.gate import Gate
from kvgate.core.geometry import Serving, UnknownGeometry
from kvgate.core.ledger import Ledger
from kvgate.core.price import effective_output_cap, kv_bytes_per_token
from kvgate.core.records import (
    Ask,
    CapRules,
    Ending,
    Granted,
    Misuse,
    PoolFacts,
    Queued,
    Reason,
    Refused,
    Tenant,
)
from kvgate.core.reservation import request_reservation_bytes, request_reservation_tokens
from kvgate.edge.library.admission import Admission, ThreadAdmission
from kvgate.edge.library.controller import KVAdmissionController, KVReservation
from kvgate.edge.library.ticket import AdmissionRefused, Ticket

__version__ = "0.1.0"

__all__ = [
    "Admission",
    "AdmissionRefused",
    "Ask",
    "CapRules",
    "Ending",
    "Gate",
    "Granted",
    "KVAdmissionController",
    "KVReservation",
    "Ledger",
    "Misuse",
    "PoolFacts",
    "Queued",
    "Reason",
    "Refused",
    "Serving",
    "Tenant",
    "ThreadAdmission",
    "Ticket",
    "UnknownGeometry",
    "__version__",
    "effective_output_cap",
    "kv_bytes_per_token",
    "request_reservation_bytes",
    "request_reservation_tokens",
]
