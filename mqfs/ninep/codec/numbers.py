"""The numbers of messages on the wire."""

from __future__ import annotations

from typing import Any

from mqfs.ninep.codec import linux_messages as linux
from mqfs.ninep.codec import messages as m

# Numbers of the T-messages; each R-message is one more. Both kinds of error have only the R.
_PAIRS: dict[int, tuple[type[Any], type[Any]]] = {
    8: (linux.Tstatfs, linux.Rstatfs),
    12: (linux.Tlopen, linux.Rlopen),
    14: (linux.Tlcreate, linux.Rlcreate),
    16: (linux.Tsymlink, linux.Rsymlink),
    18: (linux.Tmknod, linux.Rmknod),
    20: (linux.Trename, linux.Rrename),
    22: (linux.Treadlink, linux.Rreadlink),
    24: (linux.Tgetattr, linux.Rgetattr),
    26: (linux.Tsetattr, linux.Rsetattr),
    30: (linux.Txattrwalk, linux.Rxattrwalk),
    32: (linux.Txattrcreate, linux.Rxattrcreate),
    40: (linux.Treaddir, linux.Rreaddir),
    50: (linux.Tfsync, linux.Rfsync),
    52: (linux.Tlock, linux.Rlock),
    54: (linux.Tgetlock, linux.Rgetlock),
    70: (linux.Tlink, linux.Rlink),
    72: (linux.Tmkdir, linux.Rmkdir),
    74: (linux.Trenameat, linux.Rrenameat),
    76: (linux.Tunlinkat, linux.Runlinkat),
    100: (m.Tversion, m.Rversion),
    102: (m.Tauth, m.Rauth),
    104: (m.Tattach, m.Rattach),
    108: (m.Tflush, m.Rflush),
    110: (m.Twalk, m.Rwalk),
    112: (m.Topen, m.Ropen),
    114: (m.Tcreate, m.Rcreate),
    116: (m.Tread, m.Rread),
    118: (m.Twrite, m.Rwrite),
    120: (m.Tclunk, m.Rclunk),
    122: (m.Tremove, m.Rremove),
    124: (m.Tstat, m.Rstat),
    126: (m.Twstat, m.Rwstat),
}

TYPES: dict[int, type[Any]] = {7: linux.Rlerror, 107: m.Rerror}
for _number, (_request, _reply) in _PAIRS.items():
    TYPES[_number], TYPES[_number + 1] = _request, _reply
NUMBERS: dict[type[Any], int] = {message: number for number, message in TYPES.items()}
