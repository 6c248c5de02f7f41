"""Settings files with mistakes that libraries answer with other errors than their own."""

from collections.abc import Mapping

_NINES = "9" * 5000


def _aliases(value: str) -> str:
    """Ten levels, of which each is the one before nine times."""
    levels = (
        f"a{level}: &a{level} [{', '.join([f'*a{level - 1}'] * 9)}]" for level in range(1, 10)
    )
    return "\n".join([f"a0: &a0 {value}", *levels, "name: *a9"])


def _merges() -> str:
    levels = (
        f"a{level}: &a{level} {{<<: [{', '.join([f'*a{level - 1}'] * 9)}]}}"
        for level in range(1, 8)
    )
    return "\n".join(["a0: &a0 {k: 1}", *levels])


# By what is wrong: the text of the file, and what its first problem begins with after its name.
NASTY: Mapping[str, tuple[str | bytes, str]] = {
    "month 13": (
        "prices:\n- {gpu: L4, gpu_hour_usd: 2,\n   from: 2026-13-01}",
        ":3: prices[0].from: '2026-13-01' is not a date",
    ),
    "zone of four days": (
        "prices: [{gpu: L4, gpu_hour_usd: 2, from: 2026-01-01T10:00:00+99:00}]",
        ":1: prices[0].from: '2026-01-01T10:00:00+99:00' is not a date",
    ),
    "before the calendar": (
        "prices: [{gpu: L4, gpu_hour_usd: 2, from: '0001-01-01T00:00:00+10:00'}]",
        ":1: prices[0].from: '0001-01-01T00:00:00+10:00' is outside of the calendar",
    ),
    "after the calendar": (
        "prices: [{gpu: L4, gpu_hour_usd: 2, until: '9999-12-31T23:00:00-05:00'}]",
        ":1: prices[0].until: '9999-12-31T23:00:00-05:00' is outside of the calendar",
    ),
    "0x_": ("name: a\nlisten: {port: 0x_}", ":2: listen.port: '0x_' is no whole number"),
    "!!int": ("listen: {port: !!int many}", ":1: listen.port: 'many' is no whole number"),
    "!!bool": (
        "listen: {port: !!bool maybe}",
        ":1: listen.port: 'maybe' is neither true nor false",
    ),
    "!!timestamp": ("name: !!timestamp soon", ":1: name: has a tag"),
    "5,000 digits": (f"listen: {{port: {_NINES}}}", ":1: listen.port: is a number of 5000 charact"),
    "a number of 3,000 places": (
        f"listen: {{port: 1{':59' * 3000}}}",
        ":1: listen.port: is a number of 9001 characters",
    ),
    "5,000 digits as a key": (f"? {_NINES}\n: 1", ":1: is a number of 5000 characters"),
    "an infinite duration": (
        "proxy: {drain: 1e400h}",
        ":1: proxy.drain: '1e400h' is not a duration",
    ),
    "5,000 digits in a port": (
        f"otlp: {{grpc: 'h:{_NINES}'}}",
        ":1: otlp.grpc: 'h:99999",
    ),
    "no digit of ASCII": ("otlp: {grpc: 'h:٣'}", ":1: otlp.grpc: 'h:٣' is not an address"),
    "a port of a database": (
        "storage: {publish_to: 'postgresql://u:s3cret@h:99999/d'}",
        ":1: storage.publish_to: 'postgresql://u:***@h:99999/d' has a port that is not from 1",
    ),
    "a newline in a URL": (
        'engines: [{name: a, url: "http://h\\n:1"}]',
        ":1: engines[0].url: 'http",
    ),
    "nan": ("proxy: {trace_ratio: .nan}", ":1: proxy.trace_ratio: Input should be a finite numb"),
    "inf": (
        "prices: [{gpu: L4, gpu_hour_usd: .inf}]",
        ":1: prices[0].gpu_hour_usd: Input should b",
    ),
    "a price beyond all": (
        "prices: [{gpu: L4, gpu_hour_usd: 1.0e+300}]",
        ":1: prices[0].gpu_hour_usd: 1e+300 is too large",
    ),
    "a count beyond 64 bits": (
        "objectives: [{name: a, ttft_ms: 1, match: {max_input_tokens: 9223372036854775808}}]",
        ":1: objectives[0].match.max_input_tokens: 9223372036854775808 is too large",
    ),
    "deep lists": (f"name: {'[' * 5000}{']' * 5000}", ":1: is not YAML: more than 50 levels"),
    "deep mappings": (
        "\n".join(f"{' ' * level}a:" for level in range(1000)),
        ":50: is not YAML: more than 50 levels",
    ),
    "deep by aliases": (
        "\n".join(["a0: &a0 []", *(f"a{n}: &a{n} [*a{n - 1}]" for n in range(1, 200))]),
        ":1: a50[0][0]: has more than 50 levels",
    ),
    "a bomb of lists": (
        _aliases("[x, x, x, x, x, x, x, x, x]"),
        ":6: is not YAML: more than 100,000 v",
    ),
    "a bomb of merges": (_merges(), ":6: is not YAML: more than 100,000 values"),
    "an alias of itself": ("name: &a [*a]", ":1: is not YAML: an alias of no earlier value"),
    "a merge of itself": (
        "listen: &a {<<: *a, port: 1}",
        ":1: is not YAML: an alias of no earlier",
    ),
    "a merge of a text": ("listen: {<<: a, port: 1}", ":1: listen: has a << of something else"),
    "an unknown alias": ("name: *s3cret", ":1: is not YAML: an alias of no earlier value; quote a"),
    "no end of a list": (
        "otlp_metrics: {headers: {Authorization: [s3cret}}",
        ":1: is not YAML: while parsing a flow sequence",
    ),
    "a header beyond 100 digits": (
        f"otlp_metrics: {{headers: {{Authorization: {_NINES}}}}}",
        ":1: otlp_metrics.headers.Authorization: is a number of 5000 characters",
    ),
    "a section that is a text": (
        "otlp_metrics: s3cret",
        ":1: otlp_metrics: must be a mapping of keys",
    ),
    "an escape beyond Unicode": ('name: "\\Uffffffff"', ":1: is not YAML: a number in an escape"),
    "a version of 5,000 digits": (
        f"%YAML {_NINES}.1\n---\n",
        ":1: is not YAML: a number in an esc",
    ),
    "half a character": ('name: "\\ud800"', ":1: name: holds a character that no text may hold"),
    "half a character as a key": ('"\\ud800": 1', ":1: holds a character that no text may hold"),
    "NUL": (
        'security: {read_tokens: "/a\\0b"}',
        ":1: security.read_tokens: holds a character that",
    ),
    "NUL in the file": ("name: a\nlisten: \x00", ":2: is not YAML: unacceptable character #x0000"),
    "a tab": ("listen:\n\tport: 1", ":2: is not YAML: while scanning for the next token"),
    "a text": ("just words", ": holds a str, not a mapping of keys"),
    "two colons": ("a: b: c", ":1: is not YAML: mapping values are not allowed here"),
    "a repeated key": ("listen: {port: 1,\n port: 2}", ":2: the key 'port' is repeated"),
    "two documents": ("name: a\n---\nname: b", ":2: is not YAML: expected a single document"),
    "a null key": ("name: a\n~: 1", ":2: ~: the key '~' is not a text; quote it"),
    "an empty key": (
        "listen:\n  ?\n  : 1",
        ":2: listen.null: the key 'null' is not a text; quote it",
    ),
    "a number as a key": ("listen:\n  1: x", ":2: listen.1: the key '1' is not a text; quote it"),
    "a document with a tag": ("# a\n!model {a: 1}", ":2: has a tag; quote a text that begins"),
    "a key that is a mapping": ("? {a: 1}\n: 2", ":1: has a key that is a list or a mapping"),
    "UTF-16": ("name: x\n".encode("utf-16"), ": cannot be read: 'utf-8' codec"),
    "a large file": (f"name: {'x' * 2**21}", ": cannot be read: it has more than 1,048,576 bytes"),
    "a large value": (
        f"listen: {{port: {'x' * 10**6}}}",
        ":1: listen.port: Input should be a valid",
    ),
    "many passwords without a host": (
        f"name: ['{'://a:' * 200_000}', 1]",
        ":1: name: Input should be a v",
    ),
}
