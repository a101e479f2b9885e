"""kvgate: admission control for self-hosted LLM servers."""

from kvgate.core.gate import Gate
from kvgate.core.ledger import Ledger
from kvgate.core.price import effective_output_cap, kv_bytes_per_token
from kvgate.core.records import Ask, CapRules, Ending, Granted, PoolFacts, Queued, Reason, Refused

__version__ = "0.1.0"

__all__ = [
    "Ask",
    "CapRules",
    "Ending",
    "Gate",
    "Granted",
    "Ledger",
    "PoolFacts",
    "Queued",
    "Reason",
    "Refused",
    "__version__",
    "effective_output_cap",
    "kv_bytes_per_token",
]
