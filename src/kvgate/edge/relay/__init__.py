"""The gateway's data plane. Start reading at `exchange.py`: one request, from bytes to release.

`life.py` and `state.py` are the state machine and the one release, `answer.py` passes the engine's answer
on (`reply.py`; `events.py` for event streams), `own_answers.py` holds the gate's own. `client.py` frames what
clients send, `engine.py` what the engine answers, `pool.py` keeps connections to it, `heads.py` builds
request and response heads. Framing is llhttp's on both sides;
body bytes are passed on as they come, without a task, a timer or a parse for each chunk.
"""
