"""The engine's answer, on its way to one client.

Promises: each piece is written when it comes; an answer that cannot go on ends with an error event
where it has events, and by a cut that the client can see where it has not. The exchange is told
when the answer begins, is whole, or has failed; what that means for the reservation is its business.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvgate.core.records import Reason
from kvgate.edge.relay.events import EventReply, is_event_stream
from kvgate.edge.relay.heads import Headers
from kvgate.edge.relay.own_answers import error_in_answer
from kvgate.edge.relay.reply import Reply
from kvgate.edge.relay.request import Request
from kvgate.edge.relay.watch import Watch
from kvgate.wire.sse import EventStream, Usage

if TYPE_CHECKING:
    from kvgate.edge.relay.client import ClientConnection
    from kvgate.edge.relay.exchange import Exchange


class Answer:
    """Receives one response (`engine.Receiver`). `watch`: what is read of it; None: nothing."""

    __deletable__ = ("_exchange",)  # mypyc asks for it
    __slots__ = ("_added", "_client", "_exchange", "_reply", "_request", "_watch")

    _reply: Reply  # from the head on

    def __init__(
        self,
        exchange: Exchange,
        client: ClientConnection,
        request: Request,
        *,
        added: bytes,
        watch: Watch | None,
    ) -> None:
        self._exchange = exchange
        self._client = client
        self._request = request
        self._added = added
        self._watch = watch

    def head(self, status: int, phrase: bytes, headers: Headers, framing: str) -> Answer | None:
        self._exchange.answer_begins()
        request, watch = self._request, self._watch
        is_http11, keep_alive = request.is_http11, request.keep_alive
        if request.method != b"HEAD" and is_event_stream(status, headers):
            self._reply = EventReply(
                status,
                phrase,
                headers,
                framing,
                added=self._added,
                is_http11=is_http11,
                keep_alive=keep_alive,
                events=EventStream() if watch is None else EventStream(mark=watch.mark, strips=watch.strips),
            )
        else:
            self._reply = Reply(
                status,
                phrase,
                headers,
                framing,
                added=self._added,
                is_http11=is_http11,
                keep_alive=keep_alive,
                reads_usage=watch is not None,
            )
        return self if is_http11 or framing != "chunked" else None

    def passed(self, piece: bytes) -> bool:
        if self._reply.is_usual(piece):
            self._client.write(piece)
            return True
        return False

    def data(self, piece: bytes) -> None:
        out = self._reply.piece(piece)
        if out:  # a begun line of an event waits for its end
            self._client.write(out)

    def done(self) -> None:
        client, reply, exchange = self._client, self._reply, self._exchange
        # The two know each other: a circle that only the collector would open, for each request.
        del self._exchange
        tail = reply.end()
        if tail:
            client.write(tail)
        exchange.answer_whole(is_good=reply.status < 400)
        client.finished(keep_alive=self._request.keep_alive)

    def failed(self, why: str) -> None:
        self._exchange.answer_failed(why)

    @property
    def usage(self) -> Usage | None:
        """What the engine has said of its tokens, once the head has come."""
        return self._reply.usage

    def break_off(self, reason: Reason, message: str) -> None:
        """End a begun answer that cannot go on."""
        ending = self._reply.broken(error_in_answer(reason, message))
        if ending is None:
            self._client.break_off(is_visible=self._reply.is_cut_visible)
            return
        self._client.write(ending)
        self._client.finished(keep_alive=self._request.keep_alive)
