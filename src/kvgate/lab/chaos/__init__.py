"""Everything that can go wrong at once, against a real gateway, audited every second.

    python -m kvgate.lab.chaos --seconds 600 --seed N

`plan.py` draws what each client does, `caller.py` does it, `host.py` is the gateway's process, which
says what it holds and what the kernel says it holds, `laws.py` compares, `run.py` ties them together.
What is drawn is the same for the same seed; when it happens is up to the machine.
"""
