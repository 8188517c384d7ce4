"""Prints pip constraints that pin every dependency in pyproject.toml to the lowest version it allows, tools too.

`make test-min` installs with them, so that the tests have passed on the versions that the lower bounds name. What a
dependency brings along itself is as new as it can be, as it is for a user.
"""

import itertools
import re
import sys
import tomllib
from pathlib import Path

project = tomllib.loads((Path(__file__).parents[1] / "pyproject.toml").read_text(encoding="utf-8"))["project"]

found, lowest = f"{sys.version_info.major}.{sys.version_info.minor}", project["requires-python"].removeprefix(">=")
if found != lowest:
    sys.exit(
        f"error: this is Python {found}, and the lowest versions are tested on the lowest Python, {lowest}; "
        f"choose it: make test-min PYTHON=/path/to/python{lowest}"
    )
for requirement in itertools.chain(project["dependencies"], *project["optional-dependencies"].values()):
    if requirement.startswith(f"{project['name']}[") or re.fullmatch(r"[\w.-]+", requirement):
        continue  # extras of this package; what another dependency brings and bounds
    bound = re.fullmatch(r"([\w.-]+)>=([\w.]+)[^;]*(;.*)?", requirement)
    if bound is None:
        sys.exit(f"error: {requirement!r} in pyproject.toml does not begin with name>=version; write it so")
    print(f"{bound[1]}=={bound[2]}{bound[3] or ''}")
