"""What `benchmarks/relay.py` is made of.

`engine.py` and `bare.py` run as programs; `client.py` drives, `measure.py` takes one round of
figures, `gateways.py` knows how each gateway is started, `peers.py` installs them, `report.py` shows.
"""
