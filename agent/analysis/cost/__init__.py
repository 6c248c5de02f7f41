"""What requests cost: each minute's bill is split, and every cent of it belongs to one part.

A bill is any amount that is paid by time: dollars or GPU-hours. It is split by time into busy, idle
and unknown. The busy part is split by work among the requests and among prefill and decode. Work
that the engine counted for requests without a row is a part of its own.
"""
