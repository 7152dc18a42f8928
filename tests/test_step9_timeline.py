"""Step 9's timeline over ranks whose clocks disagree by seconds and days, and run at unlike speeds."""

import json

from launch import ROOT, STEPS, launch


def test_transfers_agree_across_unlike_clocks(tmp_path):
    """No send ends after its receive, none is received before it is sent: to the error that the file states."""
    launch(9, 3, STEPS["9"] / "train.py", "--pipelines", "2,3,3", "--num_microbatches", 6, "--micro_batch_size", 8,
           "--seq_len", 128, "--max_tokens", 3 * 6 * 8 * 128, "--profile_batch", 3, "--log_dir", tmp_path,
           script=ROOT / "tests" / "support" / "unlike_clocks.py")
    trace = json.loads((tmp_path / "default_run" / "timeline_batch3_all.json").read_text())
    error, found = trace["otherData"]["clock_error_us"], {"send": {}, "receive": {}}
    for event in trace["traceEvents"]:
        if event.get("cat") in found:
            me, peer, i = event["pid"], event["args"]["peer"], event["args"]["microbatch"]
            place = (me, peer, i) if event["cat"] == "send" else (peer, me, i)
            assert place not in found[event["cat"]] and event["dur"] >= 0
            found[event["cat"]][place] = (event["ts"], event["ts"] + event["dur"])
    sends, receives = found["send"], found["receive"]
    assert sends.keys() == receives.keys() and len(sends) == 2 * 2 * 6  # two boundaries, forward and back
    assert 0 < error < 2000, "a round trip within this machine takes no milliseconds"
    for place, (start, end) in sends.items():
        assert end <= receives[place][1] + error, f"{place} sent until {end} us, received at {receives[place][1]} us"
        assert start <= receives[place][1] + error, f"{place} received at {receives[place][1]} us, sent from {start} us"
    # A send that ends late is set right by its receive, which could hide a wrong clock: hardly any needs that.
    assert trace["otherData"]["sends_noticed_late_us"] < 1e5
    span = max(end for _, end in receives.values()) - min(start for start, _ in sends.values())
    assert span < 60e6, "the ranks' spans lie days apart"
