"""What requests cost: the bill of a window, split so that every cent of it is somewhere.

A bill is any amount that is paid by time, dollars or GPU-hours. It is split by time into busy, idle
and unknown, and what is busy by work among the requests, prefill and decode apart. What the engine
worked for requests that nobody saw is a part of its own.
"""
