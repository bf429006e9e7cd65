"""Rules that an event stream must keep, and findings where it does not.

Owns: the table of rules with their stable codes, the choice among them, and the list of findings. Refuses to know: how
a rule is checked.
"""

from __future__ import annotations

import enum
from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Any, Final

import attrs

from g2sim.bus.errors import ConfigError


class Severity(enum.StrEnum):
    """An error or a warning makes the check fail; a note does not."""

    ERROR = "error"
    WARNING = "warning"
    NOTE = "note"


@attrs.frozen
class Rule:
    """One rule. ``text`` says what a finding of it means."""

    code: str
    name: str
    family: str
    severity: Severity
    text: str


_E, _W, _N = Severity.ERROR, Severity.WARNING, Severity.NOTE

RULES: Final = (
    Rule("KV001", "malformed", "identity", _E, "a line or message cannot be read as an event; it is refused"),
    Rule("KV002", "damaged", "identity", _E, "the input ends early or a record of it is damaged"),
    Rule("KV003", "no-worker", "identity", _E, "an event does not say which worker it came from; it is refused"),
    Rule("KV004", "hash-kinds", "identity", _E, "one worker uses block hashes of different kinds"),
    Rule("KV005", "unknown-tag", "identity", _W, "an event has a tag that is not known; it is set aside"),
    Rule("KV101", "gap", "order", _E, "event ids are missing, and never came"),
    Rule("KV102", "repeat", "order", _W, "an event came again with the same content; it is dropped"),
    Rule("KV103", "id-reused", "order", _E, "an event id came again with other content; it is dropped"),
    Rule("KV104", "restart", "order", _E, "ids begin anew though the worker neither left nor joined"),
    Rule("KV105", "late-start", "order", _N, "the stream begins after id 0, so what came before is not known"),
    Rule("KV106", "late", "order", _W, "an event came after later ones and took its place (a note if by a replay)"),
    Rule("KV107", "too-late", "order", _E, "an event came after its gap had been given up; it is dropped"),
    Rule("KV108", "time-back", "order", _W, "time stamps of one publisher go back"),
    Rule("KV201", "unknown-medium", "tier", _W, "the medium's spelling is not in the table; the event is set aside"),
    Rule("KV202", "tier-aside", "tier", _N, "the tier is known but is not followed here; the event is set aside"),
    Rule("KV203", "group-aside", "tier", _N, "a KV cache group other than the first, or a remote copy; set aside"),
    Rule("KV301", "repeated-store", "residency", _W, "a block is stored that is resident (copies=logical)"),
    Rule("KV302", "absent-removal", "residency", _E, "a block is removed that is not resident (a note if not exact)"),
    Rule("KV401", "position", "parent", _E, "the start position does not follow from the parent's position"),
    Rule("KV402", "self-parent", "parent", _E, "a block is its own parent or is listed twice; the event is refused"),
    Rule("KV403", "unknown-parent", "parent", _W, "a device run's parent is nowhere on its rank (a note if not exact)"),
    Rule("KV404", "moved", "parent", _E, "a block is stored at a position that differs from its known one"),
    Rule("KV405", "unplaced", "parent", _N, "a run has neither parent nor position; it waits for a place"),
    Rule("KV406", "no-parent", "parent", _N, "a run has a position above 0 and no parent"),
    Rule("KV501", "over-capacity", "capacity", _E, "a rank's tier holds more blocks than it has room for"),
    Rule(
        "KV502", "pool-over-capacity", "capacity", _E, "a host pool's resident and pending blocks exceed its capacity"
    ),
    Rule("KV503", "evicted-in-use", "capacity", _E, "a host pool evicts a block that is pending, pinned or absent"),
    Rule("KV601", "clear-overtaken", "clear", _W, "a clear came after later events and was put back into its place"),
    Rule("KV611", "leave-unknown", "membership", _W, "a worker leaves that is not there"),
    Rule("KV612", "join-twice", "membership", _W, "a worker joins that is there; it is taken as new"),
    Rule("KV613", "ghost", "membership", _W, "an event comes from a worker that has left; it is taken as joined"),
    Rule("KV621", "snapshot-order", "snapshot", _E, "a snapshot lists a block before its parent"),
    Rule("KV622", "snapshot-behind", "snapshot", _E, "a snapshot ends before events that were applied already"),
    Rule("KV623", "snapshot-content", "snapshot", _E, "a rank that joins a pool is not told exactly what it holds"),
    Rule("KV701", "pool-change", "shared-pool", _E, "a rank announces a change that its host pool did not make"),
    Rule("KV702", "pool-order", "shared-pool", _E, "a rank skips or reorders changes of its host pool"),
    Rule("KV703", "pool-lag", "shared-pool", _N, "at the end a rank has not announced all changes of its host pool"),
    Rule("KV704", "pool-differs", "shared-pool", _E, "at the end ranks that share a host pool disagree on it"),
    Rule("KV801", "early", "visibility", _E, "a host block is announced before its copy has ended"),
    Rule("KV811", "play-load", "isolation", _E, "a request loads a block that another cache id stored"),
    Rule("KV812", "play-shared", "isolation", _E, "one block is announced under two cache ids"),
    Rule("KV901", "content", "hash", _E, "one block hash stands for different tokens, adapters or salts"),
    Rule("KV902", "two-hashes", "hash", _W, "equal content behind an equal parent has two block hashes"),
    Rule("KV903", "tokens-hash", "hash", _E, "a tokens hash is not that of the token ids"),
    Rule("KV904", "chain-hash", "hash", _E, "a block hash is not that of its parent and its tokens hash"),
    Rule("KV905", "token-count", "hash", _W, "the number of token ids does not fit blocks and block size"),
    Rule("KV951", "dynamo-batch", "dynamo", _W, "mode dynamo: its indexer drops a batch, as stale or as unreadable"),
    Rule(
        "KV952", "dynamo-parent", "dynamo", _W, "mode dynamo: a device run is refused, its parent is not in the index"
    ),
    Rule("KV953", "dynamo-edge", "dynamo", _W, "mode dynamo: a host run ends at an edge that contradicts it"),
    Rule("KV954", "dynamo-filter", "dynamo", _W, "mode dynamo: an event, or part of it, is dropped before the index"),
    Rule("KV955", "dynamo-below", "dynamo", _W, "mode dynamo: a removal forgets blocks that are still resident"),
)
BY_CODE: Final = {rule.code: rule for rule in RULES}


DOUBTS: Final = frozenset(
    ("KV103", "KV201", "KV302", "KV401", "KV402", "KV404", "KV501", "KV503", "KV623", "KV701", "KV702", "KV704")
)
"""Rules after whose errors and warnings nobody can say what a rank holds, though no id is missing."""
UNREAD: Final = ("KV001", "KV002", "KV003", "KV005")
"""Rules whose findings are of input that no verdict counts."""


def choose(select: Iterable[str] = (), ignore: Iterable[str] = ()) -> frozenset[str]:
    """Codes that are switched on. Each word is a code, the start of one, a name or a family.

    Raises: ConfigError for a word that fits no rule, and if none is left.
    """
    wanted = _codes(select, "--select") or frozenset(BY_CODE)
    chosen = wanted - _codes(ignore, "--ignore")
    if not chosen:
        raise ConfigError("--ignore", got=", ".join(ignore), problem="leaves no rule to check")
    return chosen


def _codes(words: Iterable[str], option: str) -> frozenset[str]:
    out: set[str] = set()
    for word in (part.strip() for given in words for part in given.split(",")):
        fits = {r.code for r in RULES if word and (r.code.startswith(word.upper()) or word in (r.name, r.family))}
        if not fits:
            allowed = "a code such as KV101, the start of one, a rule's name or family; see g2sim rules"
            raise ConfigError(option, got=word, allowed=allowed)
        out |= fits
    return frozenset(out)


@attrs.frozen(kw_only=True, slots=True)
class Finding:
    """One place where a rule is broken.

    Attributes:
        where: file and line, or file and record.
        publisher: "worker/rank", None when no worker is known.
        event: the event, in short.
        problem: the state that it contradicts.
    """

    code: str
    severity: Severity
    where: str
    publisher: str | None
    event: str | None
    problem: str

    def text(self) -> str:
        who = "" if self.publisher is None else f"{self.publisher}: "
        what = "" if self.event is None else f" ({self.event})"
        return f"{self.where}: {self.code} {self.severity}: {who}{self.problem}{what}"


class Findings:
    """All findings: counted without limit, kept up to one.

    Args:
        codes: rules that are switched on; others are not even counted.
        keep: findings kept with their text, for each code.
    """

    def __init__(self, codes: frozenset[str], keep: int = 100) -> None:
        self.codes = codes
        self.counts: Counter[tuple[str, Severity]] = Counter()
        self.kept: list[Finding] = []
        self._keep = keep
        self._kept_of: Counter[str] = Counter()
        self._here: tuple[str, set[tuple[str, str]]] = ("", set())

    def counted(self, code: str, severity: Severity) -> bool:
        """Count a finding. Whether it is also to be kept: what is not kept needs no text."""
        if code not in self.codes:
            return False
        self.counts[code, severity] += 1
        return self._kept_of[code] < self._keep

    def keep(self, finding: Finding) -> None:
        """Keep a finding that was ``counted``, unless its line or record has had one with the same words."""
        where, said = self._here
        if where != finding.where:
            self._here = where, said = finding.where, set()
        words = (finding.code, finding.problem)
        if words in said:
            return
        said.add(words)
        self._kept_of[finding.code] += 1
        self.kept.append(finding)

    def count(self, *severities: Severity) -> int:
        return sum(number for (_, severity), number in self.counts.items() if severity in severities)

    def of(self, code: str) -> list[Finding]:
        return [finding for finding in self.kept if finding.code == code]


def rule_rows(rules: Sequence[Rule] = RULES) -> list[dict[str, Any]]:
    """The table as plain values, for printing."""
    return [attrs.asdict(rule, value_serializer=lambda _i, _a, value: str(value)) for rule in rules]
