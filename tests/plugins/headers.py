"""Headers of the plugin's datagrams."""

from goodput_agent_vllm.datagrams import HEADER, write_header


def header(run: int, records: int, first: int, dropped: int) -> bytes:
    """The header of a datagram, as the plugin writes it."""
    datagram = bytearray(HEADER.size)
    write_header(datagram, run, records, first, dropped)
    return bytes(datagram)
