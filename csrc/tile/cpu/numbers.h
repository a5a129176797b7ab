// Bodies of tile/numbers.h.
#pragma once
template<typename T> TILE float number(const T &x) { return widen(x); }
template<typename T> TILE void set_number(T &d, float x) { narrow(d, x); }
