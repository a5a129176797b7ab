"""What a report looks like on a screen."""

import os
import shutil
import sys

from margay.check.compiled import OPS

SEMAPHORE_OPS = ("init", "wait", "arrive", "expect", "load")


def colours():
    return sys.stdout.isatty() and "NO_COLOR" not in os.environ


def paint(code, text):
    return f"\033[{code}m{text}\033[0m" if colours() else text


def bold(text):
    return paint("1", text)


def red(text):
    return paint("31;1", text)


def dim(text):
    return paint("2", text)


def event(kernel, op, pc, offset, value):
    where = kernel.where(pc)
    on = kernel.place(offset) if offset >= 0 else ""
    detail = {"wait": f"parity {value}", "arrive": f"{abs(value)} arrivals",
              "expect": f"{value} bytes", "load": f"{value} bytes",
              "bar_sync": f"barrier {value}", "bar_arrive": f"barrier {value}",
              "mma_wait": f"{value} groups may be left",
              "store_wait": f"{value} groups may be left", "order_wait": f"until {value}",
              "order_pass": f"to {value}"}.get(OPS[op], "")
    place, call = (where[0], where[1] or OPS[op]) if where else ("", OPS[op])
    return f"{place:<26} {call:<22} {on:<18} {detail}".rstrip()


def semaphore(kernel, found):
    """What the last phases of the semaphore in question are made of."""
    state = found["semaphore"]
    name = kernel.place(state["place"])
    lines = [f"  {kernel.fiber(found['fiber'])} waited last for {name}, which counts {state['count']} arrivals a phase:"
             if state["last_wait"] else
             f"  {name} counts {state['count']} arrivals a phase:"]
    for phase, *arrivals in state["phases"]:
        by = [f"{warps} by {fiber_name(kernel, found, fiber)} {(kernel.where(pc) or ['?'])[0]}"
              for fiber, warps, pc in arrivals]
        lines.append(f"    phase {phase:<4} " + (", ".join(by) or "none yet"))
    return lines


def fiber_name(kernel, found, number):
    block, role, member = found["roles"][number]
    return kernel.fiber({"block": block, "role": role, "member": member})


def folded(lines):
    """Lines `WHO waits for WHAT`, those that wait for the same in one."""
    groups = {}
    for line in lines:
        who, sep, what = line.partition(" waits ")
        groups.setdefault(what if sep else line, []).append(who if sep else "")
    return [f"{', '.join(filter(None, who))}{' waits ' if any(who) else ''}{what}" for what, who in groups.items()]


def access(kernel, title, description, pc):
    """Who, where, by which operation, called from where."""
    lines = []
    who = kernel.fiber(description) if description else "the block's init or end"
    where = kernel.where(pc) if pc else None
    if not where:
        return [f"  {title:<9}{who}"]
    place, op, function = where
    frames = [frame for frame in kernel.chain(pc) if not frame.inner]
    lines.append(f"  {title:<9}{bold(who)}, {bold(place)}" + (f", {op}" if op else "") +
                 (f", in {function}" if function else "")
                 + "".join(f" called at {frame.place()}" for frame in frames[1:2]))
    if source := kernel.source_line(frames[0]):
        lines.append(f"           {dim(source)}")
    return lines


def report(kernel, label, found, command):
    """A finding as text: fits a screen."""
    kernel.resolve([found["pc"], found["other_pc"],
                    *(a[2] for phase in found.get("semaphore", {}).get("phases", ()) for a in phase[1:]),
                    *(e[1] for key in ("fiber", "other_fiber") for e in found.get(key, {}).get("events", ()))])
    first, *rest = kernel.filled(found).split("\n")
    lines = [red(f"{kernel.name}: {found['rule']}") + f"   {label}, seed {found['seed']}",
             f"  {first}", *(f"    {line}" for line in folded(rest))]
    if place := kernel.place(found["place"]):
        lines.append(f"  {'on':<9}{bold(place)} of struct shared")
    lines += access(kernel, "here", found.get("fiber"), found["pc"])
    if found["other_pc"]:
        lines += access(kernel, "against", found.get("other_fiber", found.get("fiber")), found["other_pc"])
    if "semaphore" in found:
        lines += semaphore(kernel, found)
    for key in ("fiber", "other_fiber"):
        if key in found and found["rule"] != "deadlock" or key == "fiber" and key in found:
            lines.append(dim(f"  {kernel.fiber(found[key])} did last:"))
            lines += [dim(f"    {event(kernel, *e)}") for e in found[key]["events"]]
    return "\n".join([*lines, f"  again: {command}"])


def as_json(kernel, label, found, command):
    where = lambda pc: dict(zip(("line", "operation", "function"), kernel.where(pc) or ())) if pc else None
    return {"kernel": kernel.name, "problem": label, "seed": found["seed"],
            "rule": found["rule"], "text": kernel.filled(found),
            "buffer": kernel.place(found["place"]), "role": kernel.fiber(found["fiber"]) if "fiber" in found else None,
            "here": where(found["pc"]),
            "other_role": kernel.fiber(found["other_fiber"]) if "other_fiber" in found else None,
            "against": where(found["other_pc"]), "again": command}


class Progress:
    """A bar on a terminal, nothing elsewhere."""

    def __init__(self, total, shown=True):
        self.total, self.done, self.shown = max(total, 1), 0, shown and sys.stderr.isatty()

    def step(self, text=""):
        self.done += 1
        if self.shown:
            width = 30
            filled = width * self.done // self.total
            line = f"[{'#' * filled}{'.' * (width - filled)}] {self.done}/{self.total} {text}"
            print("\r" + line[: shutil.get_terminal_size().columns - 1].ljust(shutil.get_terminal_size().columns - 1),
                  end="", file=sys.stderr, flush=True)

    def clear(self):
        if self.shown:
            print("\r" + " " * (shutil.get_terminal_size().columns - 1) + "\r", end="", file=sys.stderr, flush=True)
