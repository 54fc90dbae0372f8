"""The fuzzers: what a case is, and what must hold when it is run.

A case is plain JSON and follows from a `Random`. Running one ends in nothing, in one of our own
errors (which a person reads as one sentence), or in a finding: another exception, a law that does
not hold, or something left behind.
"""

import contextlib
import hashlib
import io
import json
import math
import os
import re
import shutil
import string
import time
from pathlib import Path
from random import Random

import mutation
import subjects as sut

_WORDS = {"plot": ["slots", "x"], "data": ["show"], "cluster": ["check"]}


class Broken(Exception):
    """A law that does not hold."""


def command(words, *, codes=(0, 1, 2, 130)):
    """Run a command here; anything but a refusal in words is a finding."""
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        try:
            code = sut.main(words)
        except SystemExit as stop:
            code = stop.code
    if code not in codes:
        raise Broken(f"{words}: code {code}, {err.getvalue()[-300:]!r}")
    if "Traceback" in err.getvalue():
        raise Broken(f"{words}: a traceback, {err.getvalue()[-800:]!r}")
    if code == 2 and not err.getvalue().strip():
        raise Broken(f"{words}: refused without a word")
    return code, out.getvalue()


def one_sentence(error):
    """Whether an error of ours can be read in one go."""
    if not str(error).strip() or len(str(error)) > 20_000:
        raise Broken(f"no sentence: {type(error).__name__} {str(error)[:100]!r}") from error


class Config:
    """Command lines and settings files: taken, or refused in one sentence; nothing is made."""

    seconds = 20.0
    _DOTTED = ("train", "sft")
    _MOST_ANSWERS, _MOST_SLOTS = 300, 64

    def __init__(self, scratch):
        """The fields of all commands, and a whole file of each kind."""
        self._kinds = {name: sut.command_arguments(name) for name in sut.COMMANDS}
        self._fields = {name: list(sut.fields_of(kind)) for name, kind in self._kinds.items()}
        self._files = {
            "train": sut.settings_to_toml(sut.TrainSettings(), sut.TrainSettings()),
            "sft": sut.settings_to_toml(sut.SupervisedSettings(), sut.SupervisedSettings()),
            "simulate": sut.simulation_to_toml(sut.PRESETS["six"]()),
        }

    def case(self, random):
        """A command line, a file with some keys, or a whole file that was damaged."""
        match random.randrange(3):
            case 0:
                name = random.choice(sut.COMMANDS)
                return {"command": name, "words": self._command_line(name, random)}
            case 1:
                name = random.choice(list(self._files))
                return {"file": name, "content": self._some_keys(name, random)}
        name = random.choice(list(self._files))
        whole = self._files[name].encode()
        return {"file": name, "content": mutation.damaged(whole, random).decode("latin-1")}

    def run(self, case, folder):
        """Read it; simulate what is small enough."""
        is_refused = False
        try:
            self._read(case)
        except sut.SortedRLError as error:
            one_sentence(error)
            is_refused = True
        left = [path.name for path in Path().iterdir() if path.name != "mine.toml"]
        if left:
            raise Broken(f"something was made: {left}")
        return is_refused

    def _command_line(self, name, random):
        words = list(_WORDS.get(name, [])) if random.random() < 0.8 else []
        for path, _ in random.choices(self._fields[name], k=random.randint(0, 4)):
            words += self._flag(name, path, random)
        if random.random() < 0.2:
            random.shuffle(words)
        return words

    def _flag(self, name, path, random):
        shown = [part for part in path if part != "settings"]
        flag = "--" + (".".join(shown) if name in self._DOTTED else shown[-1])
        flag = flag if random.random() < 0.3 else flag.replace("_", "-")
        if random.random() < 0.4:
            return [f"{flag}={mutation.value(random)}"]
        return [flag, *(mutation.value(random) for _ in range(random.choice((0, 1, 1, 1, 2, 3))))]

    def _some_keys(self, name, random):
        prefix = {"train": ("settings",), "sft": ("settings",), "simulate": ("simulation",)}[name]
        known = [path[1:] for path, _ in self._fields[name] if path[:1] == prefix]
        lines = []
        for path in random.sample(known, random.randint(1, 4)):
            text = mutation.value(random)
            if random.random() < 0.5:
                text = json.dumps(text)
            elif random.random() < 0.2:
                text = f"[{text}, {text}]"
            lines.append(f"{'.'.join(path)} = {text}")
        start = 'preset = "six"\n' if name == "simulate" else ""
        return (start + "\n".join(lines)).encode("utf-8", "surrogateescape").decode("latin-1")

    def _read(self, case):
        if "command" in case:
            name = case["command"]
            given = sut.parse(
                self._kinds[name],
                case["words"],
                prog=name,
                description="",
                is_dotted=name in self._DOTTED,
            )
            if name == "simulate":
                self._simulate(given.simulation)
            return
        path = Path("mine.toml")
        path.write_bytes(case["content"].encode("latin-1"))
        if case["file"] == "simulate":
            settings = sut.simulation_from(str(path))
            path.write_text(sut.simulation_to_toml(settings))
            if sut.simulation_from(str(path)) != settings:
                raise Broken("written settings are read back as others")
            self._simulate(settings)
            return
        kind = {"train": sut.TrainSettings, "sft": sut.SupervisedSettings}[case["file"]]
        settings = sut.settings_over(kind(), sut.read_toml(path), path=path)
        path.write_text(sut.settings_to_toml(settings, kind()), encoding="utf-8")
        if sut.settings_over(kind(), sut.read_toml(path), path=path) != settings:
            raise Broken("written settings are read back as others")

    def _simulate(self, settings):
        answers = settings.num_prompts * settings.schedule.samples_per_prompt
        if answers <= self._MOST_ANSWERS and settings.engine.slots <= self._MOST_SLOTS:
            outcome = sut.simulate(settings)
            json.dumps(sut.row(outcome), allow_nan=False)


class Rows:
    """Files of rows, of lengths and of events: read, or refused with file and line."""

    seconds = 30.0

    def __init__(self, scratch):
        """Good files of every kind."""
        rows = [
            {"prompt": "What is 1 + 1?", "answer": "2", "level": 1},
            {"prompt": [{"role": "user", "content": "Say hi"}], "answer": ["a", "b"]},
            {"prompt": "", "answer": None, "place": 3, "response": "x"},
            {"prompt": "é 🙂", "answer": 1.5, "names": ["A", "B"], "solution": [True, False]},
        ]
        lines = "".join(json.dumps(row) + "\n" for row in rows).encode()
        events = scratch / "events.jsonl"
        command(["simulate", "six", "--events", str(events)], codes=(0,))
        self._files = {
            "rows.jsonl": lines,
            "rows.json": json.dumps(rows).encode(),
            "lengths.csv": b"id,length\n1,3\n2,50\n",
            "lengths.jsonl": b'{"length": 3}\n5\n{"tokens": 9}\n',
            "events.jsonl": events.read_bytes(),
        }
        parquet = scratch / "rows.parquet"
        with contextlib.suppress(ImportError):
            import pyarrow
            import pyarrow.parquet

            table = pyarrow.Table.from_pylist(
                [{"prompt": "a", "answer": b"\xff", "level": 1.5}] * 3
            )
            pyarrow.parquet.write_table(table, parquet)
            self._files["rows.parquet"] = parquet.read_bytes()
        self._tokenizer = sut.tiny_tokenizer()

    def case(self, random):
        """A damaged file, and how its columns are named."""
        name = random.choice(list(self._files))
        content = mutation.damaged(self._files[name], random)
        return {
            "name": name,
            "content": content.decode("latin-1"),
            "prompt_field": random.choice(("prompt", "prompt", "prompt", "answer", "level", "x")),
            "answer_field": random.choice((None, None, "answer", "level", "response")),
            "system": random.choice((None, None, "Be brief.")),
            "longest": random.choice((None, None, 1, 5, 1000)),
            "command": random.choice(("fit", "trace", "report")),
        }

    def run(self, case, folder):
        """Read the file as a run, an evaluation or a simulation would."""
        path = Path(case["name"])
        path.write_bytes(case["content"].encode("latin-1"))
        try:
            if path.stem == "lengths":
                for length in sut.read_lengths(path):
                    if not isinstance(length, int) or length < 1:
                        raise Broken(f"a length of {length!r}")
            elif path.stem == "events":
                more = {"fit": [], "trace": ["--out", "t.json"], "report": ["--out", "r.html"]}
                words = [case["command"], str(path), *more[case["command"]]]
                return command(words, codes=(0, 2))[0] == 2
            else:
                self._rows(case, path)
        except sut.SortedRLError as error:
            one_sentence(error)
            return True
        return False

    def _rows(self, case, path):
        data = sut.DataSettings(
            prompt_field=case["prompt_field"],
            answer_field=case["answer_field"],
            system=case["system"],
        )
        task = sut.open_task(str(path), reward=sut.reward_from("maths"), data=data)
        json.dumps([dict(row.fields) for row in task.rows])
        longest = case["longest"]
        limit = {} if longest is None else {"max_prompt_tokens": longest}
        found = sut.tokenized(task.rows, self._tokenizer, chat="auto", **limit)
        for row in found.rows:
            if not row.tokens or not all(0 <= token < 2**31 for token in row.tokens):
                raise Broken(f"tokens {list(row.tokens)[:5]}")


class Answers:
    """Answers of a model: each gets a finite reward in time, runs no code and earns by no trick."""

    seconds = 15.0
    _MATHS = (
        *("42", "1000", "-3.5", r"\frac{1}{2}", "0", "1", "x^2+1", "(1,2)", r"\{1,2\}", "B"),
        *(r"\sqrt{2}", "5\\%", "[0,1)", r"30^\circ", "text", r"\text{yes}", "1/3", "10^{100}"),
    )
    _CODE = (
        "__import__('os').system('touch pwned')",
        "[open('pwned','w') for x in [1]]",
        "[[] for dict.pwned in [1]]",
        "[x for x in [1] if (lambda: open('pwned','w'))()]",
        "{}.__class__.__base__.__subclasses__()",
        "exec(\"open('pwned','w')\")",
        "().__class__.__class_getitem__",
        "open('pwned','w')",
        "(lambda: 0)()",
        "9**9**9**9",
        "10**10**10",
        "'a'*10**10",
        "factorial(10**8)",
        "[0]*10**9",
    )
    _PIECES = (
        *(r"\frac{", "}", "{", "(", ")", "[", "]", ",", "=", "+", "*", "/", "^", "_", " ", r"\ "),
        *(r"\sqrt{", r"\text{", r"\left(", r"\right)", r"^\circ", r"\pi", "i", "x", "e", r"\infty"),
        *("is a knight", "is a knave", "(1)", "and", "not", "Either", "\n", "|", "!", "%", "$"),
        *("nan", "inf", "True", "None", "0", "1", "12", "1,000", "0.5", "1e999", "9" * 300, "-"),
        *("<think>", "</think>", "<answer>", "</answer>", r"\boxed{", "\0", "🙂", "\u202e", "٣"),
    )

    def __init__(self, scratch):
        """The prompts of the logic and the maths; those of the gym are made when first met."""
        logic = [
            *sut.open_task("knights_knaves:people=2-5,count=12").rows,
            *sut.open_task("knights_knaves:people=3-4,count=4,style=compact").rows,
        ]
        self._logic = [row.fields for row in logic]
        self._gym = sut.gym_names()
        self._gym_rows = {}
        self._rewards = {
            name: sut.load(sut.reward_from(name)).function
            for name in ("logic", "maths", "reasoning_gym")
        }

    def case(self, random):
        """A prompt and an answer to it."""
        kind = random.choice(("logic", "maths", "reasoning_gym"))
        if kind == "logic":
            fields = dict(random.choice(self._logic))
            gold = " ".join(fields["names"])
            fields |= {"is_compact": len(fields["names"][0]) == 1}
        elif kind == "maths":
            fields = {"answer": random.choice(self._MATHS)}
            gold = fields["answer"]
        else:
            fields = {"gym": random.choice(self._gym), "number": random.randrange(3)}
            gold = ""
            self._gym_row(**fields)  # some take longer to generate than an answer may take
        answer, trick = self._answer(gold, random)
        wrap = random.choice(("box", "tags", "tags", "tags and box", "none"))
        return {"kind": kind, "fields": fields, "answer": answer, "trick": trick, "wrap": wrap}

    def run(self, case, folder):
        """Score it, in an empty folder."""
        fields, options = dict(case["fields"]), {}
        if case["kind"] == "logic":
            options = {"is_compact": fields.pop("is_compact")}
        elif case["kind"] == "reasoning_gym":
            fields = dict(self._gym_row(fields["gym"], fields["number"]))
        prompt = sut.Prompt(id=0, fields=fields)
        gold = str(fields.get("answer", ""))
        answer = case["answer"].replace("GOLD", gold)
        try:
            returned = self._rewards[case["kind"]](
                prompt, self._wrapped(answer, case["wrap"]), **options
            )
            score = sut.checked_score(returned)
        except (sut.SortedRLError, sut.NoScoreError) as error:
            one_sentence(error)
            raise Broken(f"a good row is refused: {error}") from error
        if not math.isfinite(score.reward):
            raise Broken(f"a reward of {score.reward}")
        left = [path.name for path in Path().iterdir()]
        if left:
            raise Broken(f"an answer made files: {left}")
        is_gold = answer.strip().casefold() == gold.strip().casefold()
        if case["trick"] and score.parts.get("correct", 0) >= 0.5 and not is_gold:
            raise Broken(f"{answer[:60]!r} is right for {gold[:60]!r}")
        return score.parts.get("correct", 0) < 0.5

    def _answer(self, gold, random):
        """An answer, and whether it is one that must never be right."""
        match random.randrange(6):
            case 0:
                return random.choice(self._CODE), True
            case 1:
                return random.choice(("nan", "inf", "", "NaN", "-inf", "[]", "{}")), True
            case 2:
                bracket = random.choice(("{", "(", "[", r"\frac{", r"^\circ", r"\sqrt{", "-", "!"))
                return bracket * random.choice((5, 50, 500, 5000)) + gold, False
            case 3:
                text = list("GOLD" if random.random() < 0.5 else gold)
                text.insert(random.randrange(len(text) + 1), random.choice(self._PIECES))
                return "".join(text), False
            case 4:
                letters = [random.choice(string.printable) for _ in range(random.randrange(40))]
                return "".join(letters), False
        return "".join(random.choices(self._PIECES, k=random.randint(1, 30))), False

    def _gym_row(self, gym, number):
        rows = self._gym_rows.setdefault(gym, [])
        if not rows:
            rows += sut.gym_rows_here(sut.GymSettings(name=gym, count=3))
        return rows[number].fields

    @staticmethod
    def _wrapped(answer, wrap):
        match wrap:
            case "box":
                return f"So it is \\boxed{{{answer}}}."
            case "tags":
                return f"<think>hm</think><answer>{answer}</answer>"
            case "tags and box":
                return f"<think>hm</think><answer>\\boxed{{{answer}}}</answer>"
        return answer


class Checkpoints:
    """Run folders that were damaged: read, resumed, or refused; nothing else is touched."""

    seconds = 120.0

    def __init__(self, scratch):
        """A real run of some updates, with an evaluation."""
        self._run = scratch / "good"
        command(
            [
                *("train", "--model", "tiny:hidden=32,layers=1,heads=2,context=256"),
                *("--task", "knights_knaves:people=2-3,count=24,style=compact"),
                *("--out", str(self._run), "--device", "cpu", "--threads", "1"),
                *("--engine.slots", "6", "--engine.max-tokens", "24", "--rewards.workers", "1"),
                *("--schedule.group-prompts", "8", "--schedule.update-batch", "4"),
                *("--evaluation.tasks", "knights_knaves:people=2,count=4,style=compact,split=test"),
                *("--evaluation.every", "2", "--saving.every", "1", "--max-updates", "3"),
            ],
            codes=(0,),
        )

    def case(self, random):
        """What is done to it, and what is then asked for."""
        action = random.choices(
            ("report", "trace", "plot", "fit", "resume", "eval"), (4, 4, 2, 1, 4, 2)
        )
        return {"action": action[0], "damage": random.randrange(2**32)}

    def run(self, case, folder):
        """Damage a copy, keep it as a reproducer, and ask."""
        kept, run = folder / "kept", Path("run")
        if not kept.exists():
            mutation.copied(self._run, kept)
            mutation.damage_folder(kept, Random(case["damage"]))
        mutation.copied(kept, run)
        before = _hashes(run)
        action = case["action"]
        if action == "resume":
            words = ["train", str(run), "--resume", "--max-updates", "4", "--device", "cpu"]
        elif action == "eval":
            words = ["eval", str(run / "model"), "--tasks", "knights_knaves:count=2,style=compact"]
            words += ["--max-tokens", "8", "--slots", "2", "--device", "cpu", "--workers", "1"]
        else:
            words = {
                "report": ["report", str(run), "--out", "r.html"],
                "trace": ["trace", str(run), "--out", "t.json"],
                "plot": ["plot", "learning", str(run), "--out", "p.svg"],
                "fit": ["fit", str(run / "events.jsonl")],
            }[action]
        code, _ = command(words)
        if action != "resume" and _hashes(run) != before:
            raise Broken(f"{action} changed the folder of the run")
        if action == "resume" and code == 2 and not set(before) <= set(_hashes(run)):
            raise Broken("a resume that was refused deleted files")
        return code == 2


class Faults:
    """Cases that go wrong on purpose: they try the harness."""

    seconds = 1.0

    def __init__(self, scratch):
        """Nothing is needed."""

    def case(self, random):
        """One of the ways to go wrong, or none."""
        return {"kind": random.choice(("hangs", "dies", "raises", "passes", "is refused"))}

    def run(self, case, folder):
        """Go wrong."""
        match case["kind"]:
            case "hangs":
                time.sleep(60)
            case "dies":
                os._exit(7)
            case "raises":
                raise Broken("on purpose")
        return case["kind"] == "is refused"


def _hashes(folder):
    """The files of a folder and what is in them."""
    return {
        str(path.relative_to(folder)): hashlib.sha256(path.read_bytes()).hexdigest()
        for path in folder.rglob("*")
        if path.is_file()
    }


def place_of(error):
    """Where in the package an exception came from: what tells one finding from another."""
    frames, trace = [], error.__traceback__
    while trace is not None:
        path = Path(trace.tb_frame.f_code.co_filename)
        if path.is_relative_to(sut.sortedrl_source):
            frames.append(f"{path.relative_to(sut.sortedrl_source)}:{trace.tb_lineno}")
        trace = trace.tb_next
    if frames:
        return frames[-1]
    return re.sub(r"[0-9]+|'[^']*'|\"[^\"]*\"", "#", str(error))[:80]


def emptied(folder):
    """The folder, empty."""
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    return folder


FUZZERS = {
    "config": Config,
    "rows": Rows,
    "answers": Answers,
    "checkpoints": Checkpoints,
    "faults": Faults,
}
