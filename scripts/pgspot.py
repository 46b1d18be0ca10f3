"""pgspot on each install and upgrade script: PYTHONPATH=where-it-is python3 pgspot.py SQL-FOLDER ACCEPTED. Fails at a finding
that the file ACCEPTED does not list, at a line of it that is no finding, and at a function of those that is not in C."""

import pathlib
import re
import subprocess
import sys

sql, accepted_file = map(pathlib.Path, sys.argv[1:])
accepted = {line for line in accepted_file.read_text().splitlines() if line and not line.startswith("#")}
scripts = sorted(sql.glob("harvest_fair--*.sql"))
seen = set()
failed = False


def complain(text):
    global failed
    failed = True
    print(text, file=sys.stderr)


def check(script):
    # An upgrade script alters what the install script of its first version made.
    first = re.fullmatch(r"harvest_fair--(.+)--.+", script.stem)
    before = [str(sql / f"harvest_fair--{first[1]}.sql")] if first else []
    command = [sys.executable, "-c", "from pgspot.cli import run; run()", *(["--append"] if before else []), *before, str(script)]
    said = subprocess.run(command, capture_output=True, text=True)
    findings = re.findall(r"^(PS\d+: .*?)(?: at line \d+)?$", said.stdout, re.MULTILINE)
    # It ends with 1 where it finds something: with anything else, or without a word, it has not looked.
    if said.returncode not in (0, 1) or not re.search(r"^ *Errors: \d+", said.stdout, re.MULTILINE):
        complain(f"pgspot failed on {script.name}: {said.stdout}{said.stderr}")
    for finding in findings:
        if finding not in accepted:
            complain(f"{script.name}: {finding}")
    seen.update(findings)


if not scripts:
    complain(f"no script in {sql}")
for script in scripts:
    check(script)
for line in sorted(accepted - seen):
    complain(f"{accepted_file.name}: no finding any more: {line}")

# The reason that the file gives holds for C only.
for script in scripts:
    for body in re.findall(r"CREATE (?:OR REPLACE )?FUNCTION\b.*?;\n", script.read_text(), re.DOTALL):
        if "SECURITY DEFINER" in body and not re.search(r"LANGUAGE c\b", body):
            complain(f"{script.name}: SECURITY DEFINER, and not in C: {body.splitlines()[0]}")
sys.exit(failed)
