"""Unpacks blocks of the types IQ1, IQ2 and IQ3, which consist of vectors of a grid.

A grid is a fixed set of vectors of eight elements, or of four. A block has the numbers of its
vectors, the signs of their elements (except in IQ1), and scales.
"""

from __future__ import annotations

import base64
import functools
import zlib

import torch
from torch import Tensor

from gptmanager.models.gguf.blocks.block_fields import bit_fields, halves, short_words, words

_TWO, _THREE_XXS, _THREE_S, _ONE = (
    (8, 25, 43),
    (4, 12, 20, 28, 36, 44, 52, 62),
    (1, 3, 5, 7, 9, 11, 13, 15),
    (-1, 0, 1),
)
# The elements of each grid's vectors, and how many elements a vector has.
_ELEMENTS = {
    "IQ2_XXS": (_TWO, 8),
    "IQ2_XS": (_TWO, 8),
    "IQ2_S": (_TWO, 8),
    "IQ3_XXS": (_THREE_XXS, 4),
    "IQ3_S": (_THREE_S, 4),
    "IQ1_S": (_ONE, 8),
}
_DELTA = 0.125  # is added to, or subtracted from, the elements of IQ1
# Which vectors are in a grid: a bit for each possible vector, compressed by zlib, in base 85.
# If elements are digits, the first one the lowest, then the numbers of vectors ascend.
_GRIDS = {
    "IQ2_XXS": (
        "c-nPRORB^$43oj#tB`je2YP^R=KfcCw)5@K5e=lV<VbEmf91ogR%p3E0BR^O#16P=^@J3)+t0mx___f>P^zD"
        "olEn6;is&dxI!#Zg_{KuzkVd4Mw`?l*l~*(z5~c8Qj-!-YZym34v`$TQ4<4*~)dpL;rq|+W4irx`d$&)6^vG"
        "b7UkLBrzcFbHqcf>sMFwRxr;MTG;*}m%Qlby-@@TSk)X7om@@#uKQIjUUWQ&$2&y}*gX5TV=Bc|Cuh1wL(2K"
        "n3A3Yj<N%;gblzhT7_jxp@MF=lA5st5R^Hl2J=^JV`E{Z0D^#$6R7"
    ),
    "IQ2_XS": (
        "c-mc2TdsvL2pkgnkBRPwCicH3cK=&BJX-bM<{ZTW!^|+oxJIi-qkD|rsuaR~iB<*?x~C4>8J0pJW<V>X*vo#"
        "SY&(-c)w(<-fCU6QVt|)*=>oJ=N8h~B3mmYKBw*Y)Ca<s*uvOak7T*la5<g=kAh?T96(5+bR(Mt@J=L5^n!u"
        "1sF+~=p=RjVCGbM+vDH*59tF!>kC`)-u3GzO}jM8X_r-*1ytubG*&a^iqGs?p-do}D8x2NWXU?%O)=7t88q0"
        "40RdJ=Ak)9T+$YBcFD31^6BC_W+mG1}iEA-T}Oj@u6-pQ1yByIl9%`W3mW#F%j~<yh(N0zSL~oH^Zy%}}tQx"
        "4=M73#xoc?jNErTmD?iDs40;(&MG>YYMNuDE=SK;cc#9vM%q_=>7msuqjC"
    ),
    "IQ2_S": (
        "c-n1JU5W-F3~NE(E9iYHjPDBe{#V(wI=kPpE5rQ7#3X8F%Z9aF@G^(h-0EI3Em0|W3^QwctZ7zp0a8G#rYWS"
        "&oF&YfEj@sgh^u5FBBgC>LAkBEEtarKv-X}c)kMD5E9g)N*35uFS6j&;COQ!QC2=T0oAzp}=fs8f?3xctXeG"
        "?g^dQAA!2(KVP=j1x!<Qgx@l7F)Pu!TMd$m>{ZzEray(N$AzRb24)#*U9zYZZF^+2!@EVQ9?ARiEH!J<ErE8"
        "usn4?()-BQhW*1pE<<S|Z6aT82aQO}QP4+el6zUY~*z7~Sl6pK?p!Q_DMIhH4w7?joIO9P^#Dw9CRS7mu8OB"
        "C|vDii4FoWN_zK9m?6y$}qXC*pyH_2f!)+bXep&HXz~CYasM7Fd3(JhmM~KIbkHJ7yU4;E692~{FNElHOf~F"
        "zm+TBn!W(JyjC6"
    ),
    "IQ3_XXS": (
        "c-l=-F%H5o3_M%0RAmZ7_lgPeigaLyA4Q!IuVCbv_?)J2Rn;aw-<^~BWtxCXwzFx0%xW)eST<YW5KL&L;j#h"
        "AAHoX-c)&}FY<X@1m|7IGsjrX>q7@bAuHrcP3L2_`6x)_>^v5;&o?@Fdagv_Uo9H*utGOGEJ93R6P|L2rgx{"
        "U}Y-UnrS3sKYtPIbF!WdDS7|dsT<9UQCqzhJe8+4kK5km%XvHjm=J(sMgqk-e3v^zjTJayVggoDWMJzTWE4a"
        "0T)3l-9P!ydlNePrBA?Xny*@kmBo4W|8$?wEo20v5Uy_5"
    ),
    "IQ3_S": (
        "c-k#d!AiqG5PdVu!e&pqA>uXNMyUCUt<-~hDT4SrX{pfmmf{D9Rs{Q#&TgE;z`Qr}-rMBob#A|%IbF{W(Id*"
        "&Lkwq!%0~0(%@Ao{OU0lD_x2OXCI^OquXIKLt}o^pYnG?L6&oz+9HeSVPSrN(A}t!YmF^Xmp*3Qy-5G8(e|b"
        "5Y-VC?q(AA>+32wuC)HmEXp@c1}PT|h83}iuXSwt^ePGkv?U+Lf3a_=1ov?9@{igP&9v4ypFswx3&TJZ@M2_"
        "=SuX>*z&qp%+CoXl)ge8!drA@5Agyn!FG+()?*sDei}n1QT95(J|p-wR7#Aht{0!Hx!aZfy;cl!bD4D3uqR("
        "zW`GY5;6>@R{_|3X$jRqNR^eu)^e<Ll^vCYlKPU1;QQ+o$IB(hKom+bHx0SXmXXwyZnVo8~6jd#wQ>"
    ),
    "IQ1_S": (
        "c-k#eK}(!R7=CxE;dM-9V?RN1diSfb(^(PgE$L;EU0C#DLh=VZ*|bQ>IZZw%yXlwN6ha`hG?#HO$v6$G@ldv"
        "(umMk2dT8mb2WdTox*h^v8VtnDuD#8?@Vw9Syw7v(LR2?w<}y}3b9YJG^C&5*&qs>Nl?x;NhAB!%0hRecnsm"
        "$a2YwJ@;QqccSPG~@n#@N5uBY$^gNY22s7}?HYgoxmY#Y+!Ajh1yxWA4l1OzVO1-XRyWBes^wA;LAoBq<x!%"
        "nuPhFWp9`{&R@7DG%<XIwD^Is3Q$Jf@<B<<hd(0^?jzIHG8vQn*?-$Ub(LsHW&@kYNcQ%|}dP%c;av8KJU^m"
        "WiJv*28-WD<$YEG%#}+D!ES;XeDuFD(VlG#i@A4$V;H%7rH52w&LB_pg1xSvl=L<CZ@9?{WdkSxbxSuMq|l6"
        "4F4MqT|O(RS}O@H(bLXvHn!_OntvSw2GXTKiD_6XGLxujp0!)qyF+V=7Bv?g3oFy??D1-6?{(2le%HQrc>Le"
        "(m#@Cb_P%)g$;r#{<KcsUbe#9?p_<1{H>jE?+1SCIq;Fwj@yPMjA_U90?}vdY$)D1%>fQq-z{36HBT$I&mG*"
        "v%J#A~V%aSj@pZtCEAg}V1eou`2@uUxU_YQ=)6;l3U7EjmAKr#y2F0kdO91c}@u6ikZ68>90+)KINV7E3oVy"
        "0wcNC7Qg*Gnz$6Ckekcj5w;yQl$8BcV}uIeIA*;9XR~L2uzcrHYS+2)y-rqrtcg6e{stpn$cM#il(dTBx(R&"
        "0u-;P1DmAvG}u@dX;b%ns9v~6p49X^c}lqEMlIFjzJBbrp$X4T{{D_p5YV7e^~xM<^E7<_56qcAaL=FI+lT|"
        "4v2#Y&dpW2-Egd@Fdf5G@Dheeu*|v(bMFD;1sQ1"
    ),
}


@functools.cache
def _grid(name: str) -> Tensor:
    """Return the vectors of a grid, float32 `[vectors, elements]`."""
    elements, size = _ELEMENTS[name]
    stored = bytearray(zlib.decompress(base64.b85decode(_GRIDS[name])))
    is_in = bit_fields(torch.frombuffer(stored, dtype=torch.uint8)[None], 1, 8)[0]
    numbers = is_in.nonzero()
    digits = numbers // len(elements) ** torch.arange(size) % len(elements)
    return torch.tensor(elements).float()[digits]


@functools.cache
def _signs() -> Tensor:
    """Return, for each byte, a factor for each of its bits, lowest first: -1 for a bit 1."""
    return 1 - 2 * bit_fields(torch.arange(256).unsqueeze(1), 1, 8).float()


@functools.cache
def _even_signs() -> Tensor:
    """Return `_signs` for 7 bits. The eighth bit makes the number of bits 1 even."""
    first = _signs()[:128, :7]
    return torch.cat((first, first.prod(1, keepdim=True)), 1)


def _scaled(scales: Tensor, values: Tensor) -> Tensor:
    """Return the elements of blocks times `scales [blocks, n]`, one for each n-th of a block."""
    count = scales.shape[1]
    return (scales.unsqueeze(-1) * values.reshape(len(scales), count, -1)).flatten(1)


def _signed(name: str, numbers: Tensor, signs: Tensor) -> Tensor:
    """Return the vectors with these numbers in a grid, times `signs [blocks, n, 8]`."""
    return _grid(name)[numbers.long()].reshape(signs.shape) * signs


def _in_words(found: Tensor) -> tuple[Tensor, Tensor]:
    """Return a factor for each word `[blocks, n]`, and signs for four times eight elements.

    The signs are `[blocks, 4 * n, 8]`.
    """
    return 0.5 + (found >> 28).float(), _even_signs()[bit_fields(found, 7, 4)]


def iq2_xxs(blocks: Tensor) -> Tensor:
    found = words(blocks, 2, 66)
    factors, signs = _in_words(found[:, 1::2])
    values = _signed("IQ2_XXS", bit_fields(found[:, ::2], 8, 4), signs)
    return _scaled(halves(blocks, 0) * factors * 0.25, values)


def iq2_xs(blocks: Tensor) -> Tensor:
    found = short_words(blocks, 2, 66)
    factors = 0.5 + bit_fields(blocks[:, 66:], 4, 2).float()
    values = _signed("IQ2_XS", found & 511, _even_signs()[found >> 9])
    return _scaled(halves(blocks, 0) * factors * 0.25, values)


def iq2_s(blocks: Tensor) -> Tensor:
    numbers = blocks[:, 2:34].long() | bit_fields(blocks[:, 66:74], 2, 4).long() << 8
    factors = 0.5 + bit_fields(blocks[:, 74:], 4, 2).float()
    values = _signed("IQ2_S", numbers, _signs()[blocks[:, 34:66].long()])
    return _scaled(halves(blocks, 0) * factors * 0.25, values)


def iq3_xxs(blocks: Tensor) -> Tensor:
    factors, signs = _in_words(words(blocks, 66, 98))
    values = _signed("IQ3_XXS", blocks[:, 2:66], signs)
    return _scaled(halves(blocks, 0) * factors * 0.5, values)


def iq3_s(blocks: Tensor) -> Tensor:
    numbers = blocks[:, 2:66].long() | bit_fields(blocks[:, 66:74], 1, 8).long() << 8
    factors = 1 + 2 * bit_fields(blocks[:, 106:], 4, 2).float()
    values = _signed("IQ3_S", numbers, _signs()[blocks[:, 74:106].long()])
    return _scaled(halves(blocks, 0) * factors, values)


def _shifted(numbers: Tensor, is_less: Tensor) -> Tensor:
    """Return vectors of the grid of IQ1, less `_DELTA` where `is_less`, otherwise plus it."""
    by = torch.where(is_less.bool(), -_DELTA, _DELTA)
    return _grid("IQ1_S")[numbers] + by.unsqueeze(-1)


def iq1_s(blocks: Tensor) -> Tensor:
    found = short_words(blocks, 34, 50)
    numbers = blocks[:, 2:34].long() | bit_fields(found, 3, 4) << 8
    factors = 2 * (found >> 12 & 7).float() + 1
    values = _shifted(numbers, (found >> 15).repeat_interleave(4, 1))
    return _scaled(halves(blocks, 0) * factors, values)


def iq1_m(blocks: Tensor) -> Tensor:
    found = short_words(blocks, 48, 56)
    # each word has four bits of the scale of the block in its highest bits
    bits = (found >> 12 << torch.arange(0, 16, 4)).sum(1, keepdim=True)
    high = bit_fields(blocks[:, 32:48], 4, 2).long()
    factors = 2 * bit_fields(found, 3, 4).float() + 1
    values = _shifted(blocks[:, :32].long() | (high & 7) << 8, high >> 3)
    return _scaled(bits.to(torch.int16).view(torch.float16).float() * factors, values)
