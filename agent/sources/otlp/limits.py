"""What one export may hold and what all exports may take together; `docs/otlp.md` explains it.

The agent lives in 512 MiB and takes 140 of them at rest. What is below takes 240 MiB at most.
"""

KIB = 1024
MIB = 1024 * KIB

# One body over HTTP, after decompression; opentelemetry-proto docs/specification.md recommends
# 20 MiB at least. vLLM's spans are compressed to less than a quarter.
MAX_BODY_BYTES = 64 * MIB
MAX_GZIP_BYTES = 24 * MIB

# One message over gRPC, whose own default is 4 MiB. gRPC does not say how long a message is before
# all of it is in memory, and for a moment has it three times.
MAX_GRPC_BYTES = 16 * MIB
MAX_GRPC_READING = 4
# Calls that wait to be read: gRPC holds up to 64 KiB of each. One more refuses the oldest.
MAX_GRPC_WAITING = 256
# Connections whose last message stalled, which wait behind the others.
MAX_STALLED_KNOWN = 1024

# One body in JSON. Python's parser cannot be interrupted: 550,000 values hold up the agent for
# 0.1 s if they are vLLM's, and for 0.3 s at most. A collector sends 8,192 spans: of vLLM they are
# 490,000 values and 10 MiB.
MAX_JSON_BYTES = 12 * MIB
MAX_JSON_VALUES = 550_000
JSON_VALUE_BYTES = 140  # as Python objects: measured for vLLM's spans

# The spans, scopes and resources of one body: 64 MiB of vLLM's spans have 140,000. One span or
# resource with 4 MiB of text is a prompt of a million tokens.
MAX_PARTS = 250_000
MAX_SPAN_BYTES = 4 * MIB

# A large body is parsed, read and stored in pieces of this size, and other senders come between.
PIECE_BYTES = 512 * KIB
PIECE_SPANS = 2048
# Two of them are in memory as records, one to be stored while the next one is read.
PIECES_TAKE_BYTES = 8 * MIB
# Two bytes can encode an empty attribute, which takes 82 bytes in memory.
MAX_PIECE_PARSED_BYTES = 64 * MIB

# All bodies in hand, plain and compressed, of both doors. Large ones leave a part to those of a
# usual size: vLLM sends 512 spans, which are 0.25 MiB.
MAX_BYTES_HELD = 112 * MIB
KEPT_FOR_SMALL_BYTES = 16 * MIB
SMALL_BYTES = 1 * MIB

# A sender gives way to others when its body has not grown for so long by a sixteenth and 64 KiB,
# or its message over gRPC is not complete.
PATIENCE_S = 1.0
PROGRESS_BYTES = 64 * KIB
# The longest time for a body to arrive when no other sender waits. vLLM's exporter gives up after
# 10 s.
HTTP_BODY_WITHIN_S = 30.0
GRPC_BODY_WITHIN_S = 10.0
# No sender waits longer for an answer, so storing the rest of a body is of no use.
STORED_WITHIN_S = 60.0
