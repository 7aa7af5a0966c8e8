import torch


def chosen_row(scores, row, spread=None):
    return row, scores[row].mean(), scores[row].max() - scores[row].min() if spread is None else spread


WRONG_ANSWERS = {
    "check_content_weights": [
        (lambda w, p: w[..., p:], "the rows do not sum to one"),
        (lambda w, p: torch.softmax(w[..., p:], -1), "a second softmax flattens"),
        (lambda w, p: w[..., p:] / w[..., :p].sum(-1)[..., None], "divides by the share of the prefix"),
        (lambda w, p: w[:, :, :, p:] / w[:, :, :, p:].sum(2, keepdim=True), "the sum ran over the queries"),
        (lambda w, p: w[..., p:] / w[..., p:].sum(), "one sum was taken over everything"),
        (lambda w, p: w[..., p:] / w[..., p:].max(-1, keepdim=True)[0], "divided by its largest weight"),
        (lambda w, p: w[..., :-p] / w[..., :-p].sum(-1, keepdim=True), "the last columns were dropped"),
        (lambda w, p: w[..., :p] / w[..., :p].sum(-1, keepdim=True), "columns of the prefix"),
        (lambda w, p: w[:, p:] / w[:, p:].sum(-1, keepdim=True), r"Your output has shape \[2, 0, 5, 10\]"),
        (lambda w, p: w[..., p:] / w[..., p:].sum(-1), "raised RuntimeError"),
        (lambda w, p: w[..., p:] / (1 + w[..., :p].sum(-1, keepdim=True)), "entries are wrong"),
    ],
    "check_honest_score": [
        (lambda v, t: chosen_row(t, int(t[:, 0].argmax())), "chosen on the test scores"),
        (lambda v, t: chosen_row(t, t.mean(1).argmax().item()), "chosen on the test scores"),
        (lambda v, t: chosen_row(t, v[:, 0].argmax().item()), "chosen with seed 0 alone"),
        (lambda v, t: chosen_row(t, v.amax(1).argmax().item()), "the luckiest run"),
        (lambda v, t: chosen_row(v, v.mean(1).argmax().item()), "these are validation scores"),
        (
            lambda v, t: (v.mean(1).argmax().item(), t[v.mean(1).argmax()].max(), chosen_row(t, v.mean(1).argmax())[2]),
            "the best seed was reported",
        ),
        (
            lambda v, t: (v.mean(1).argmax().item(), t[v.mean(1).argmax()][0], chosen_row(t, v.mean(1).argmax())[2]),
            "seed 0 alone was reported",
        ),
        (
            lambda v, t: chosen_row(t, v.mean(1).argmax().item(), t[v.mean(1).argmax()].std()),
            "not the standard deviation",
        ),
        (lambda v, t: chosen_row(t, v.mean(1).argmax().item(), t.max() - t.min()), "taken over all rates"),
        (lambda v, t: t[v.mean(1).argmax()].mean(), "should be 3 results, and is one Tensor"),
        (lambda v, t: chosen_row(t, v[0].argmax().item()), "Your output 0 is 0, expected 2"),
    ],
    "check_least_read": [
        (",", "has none"),
        ("h", "has none there"),
        ("3", "not what comes out"),
    ],
    "check_weekday_site": [
        ("decoder", "nothing is right"),
        ("cross", "nothing is right"),
        ("none", "not what comes out"),
    ],
    "check_site_alone": [
        (["most", "most"], "which are gone now"),
        (["none", "none"], "do without the others"),
        (("most", "none"), "exactly reversed"),
        (["some", "some"], "not what comes out"),
    ],
    "check_survives": [
        (["yes", "yes", "yes"], "single runs"),
        (("no", "no", "no"), "one of the three is clear"),
        (["yes", "yes", "no"], "two slots and twenty"),
        (["no", "yes", "yes"], "nearly the same"),
        (["yes", "no", "no"], "not what comes out"),
    ],
}
