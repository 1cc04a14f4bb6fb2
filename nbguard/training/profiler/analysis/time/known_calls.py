"""Calls that are known to take long in each batch, with the way to recognize a line that makes one, and the remedy."""

from __future__ import annotations

import re

_SAVE = "save less often: once an epoch, or where the validation has improved"
_WRITE = "collect the output, and write it once an epoch"
_GROW = "collect the parts in a list, and join them once, after the loop"
_OF_LISTS = "of a list of arrays: `torch.from_numpy(np.stack(arrays))`; or make the tensors once, before the loop"
_METRIC = "compute it once an epoch, from the collected predictions"
_DRAW = "draw once an epoch"
_OUT = "leave it out of the loop"
KNOWN_CALLS = {
    "torch.save": _SAVE,
    "deepcopy": "copy less often, and only the `state_dict()` of the best model",
    "torch.tensor": _OF_LISTS,
    "torch.as_tensor": _OF_LISTS,
    "torch.FloatTensor": _OF_LISTS,
    "gc.collect": _OUT,
    "empty_cache": _OUT,
    "time.sleep": _OUT,
    "print": "print each 100th batch, and numbers, not whole tables",
    "display": "display once an epoch",
    "open": _WRITE,
    "json.dump": _WRITE,
    "pickle.dump": _WRITE,
    "np.save": _WRITE,
    "np.savez": _WRITE,
    "to_csv": _WRITE,
    "to_parquet": _WRITE,
    "to_pickle": _WRITE,
    "write_text": _WRITE,
    "pd.concat": _GROW,
    "np.append": _GROW,
    "np.concatenate": _GROW,
    "torch.cat": _GROW,
    "plt.subplots": _DRAW,
    "plt.plot": _DRAW,
    "plt.show": _DRAW,
    "savefig": _DRAW,
    "f1_score": _METRIC,
    "roc_auc_score": _METRIC,
    "accuracy_score": _METRIC,
    "precision_score": _METRIC,
    "recall_score": _METRIC,
    "average_precision_score": _METRIC,
    "confusion_matrix": _METRIC,
    "classification_report": _METRIC,
}
"""The remedy by the call, as it is written, without the object in front of a method."""
_CALL = re.compile(rf"(?<!\w)({'|'.join(map(re.escape, sorted(KNOWN_CALLS, key=len, reverse=True)))})\(")


def known_call(text: str) -> str:
    """Return the known call that a line of code makes, "" if none, or several different ones."""
    found = set(_CALL.findall(text))
    return found.pop() if len(found) == 1 else ""
