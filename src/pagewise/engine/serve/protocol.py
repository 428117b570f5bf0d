"""HTTP for clients that send slowly, or that close the half of a connection on which they send (lesson 9).

uvicorn gives a request as much time as it takes to arrive. A client that has sent its request may close its half of the
connection (`shutdown` of a socket) and still read. uvicorn takes it for a client that has gone. Both look the same
until the server sends something: the system of a client that has gone resets the connection. Therefore the server sends
once a second what clients skip: "100 Continue" until its answer begins, and then comments in a stream.
"""

import json
from typing import Any

import h11
from uvicorn.protocols.http.h11_impl import H11Protocol

from pagewise.engine.serve.answer import Failure

STILL_THERE, COMMENT = b"HTTP/1.1 100 Continue\r\n\r\n", b":\n\n"
EVERY = 1.0  # seconds


class Protocol(H11Protocol):
    """A connection. A request that does not arrive within `seconds` gets the status 408, and the connection ends."""

    def __init__(self, *arguments: Any, seconds: float, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self.seconds = seconds
        self.too_late = self.loop.call_later(seconds, self.end)  # is cancelled unless a request arrives
        self.half_closed = False

    @property
    def arrives(self) -> bool:
        """Whether the beginning of a request is here, and the rest is not."""
        state = self.conn.their_state
        return state is h11.SEND_BODY or (state is h11.IDLE and bool(self.conn.trailing_data[0]))

    def data_received(self, data: bytes) -> None:
        """Take a part of a request, and note whether more of it must come."""
        super().data_received(data)
        if not self.arrives:
            self.too_late.cancel()
        elif self.too_late.cancelled():
            self.too_late = self.loop.call_later(self.seconds, self.end)

    def end(self) -> None:
        """End the connection of a request that has not arrived in time, or of a client that sends nothing."""
        if self.arrives and self.conn.our_state in (h11.IDLE, h11.SEND_RESPONSE):
            error = Failure(f"the request did not arrive within {self.seconds:g} seconds", status=408)
            content = json.dumps(error.body).encode()
            head = f"Content-Type: application/json\r\nContent-Length: {len(content)}\r\nConnection: close\r\n\r\n"
            self.transport.write(f"HTTP/1.1 {error.status} Request Timeout\r\n{head}".encode() + content)
        self.transport.close()

    def eof_received(self) -> bool:
        """Return whether the connection stays open: whether a request has arrived that is not answered yet."""
        cycle = self.cycle
        waits = cycle is not None and not (cycle.more_body or cycle.response_complete)
        self.half_closed = waits and cycle.scope["http_version"] == "1.1"  # older clients know no interim answers
        if self.half_closed:
            self.probe()
        return self.half_closed

    def probe(self) -> None:
        """Send something that clients skip. If the client has gone, the second time ends the wait."""
        if not self.transport.is_closing():
            if not self.cycle.response_started:
                self.transport.write(STILL_THERE)
            elif self.cycle.scope.get("streams") and not self.cycle.response_complete:
                self.transport.write(self.conn.send(h11.Data(COMMENT)))
            self.loop.call_later(EVERY, self.probe)

    def on_response_complete(self) -> None:
        """Go on with the next request that has arrived. A client that sends no more gets no more."""
        super().on_response_complete()
        if self.half_closed and self.cycle.response_complete:
            self.transport.close()
