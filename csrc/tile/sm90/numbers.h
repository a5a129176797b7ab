// Bodies of tile/numbers.h on sm_90a.
#pragma once
template<typename T> TILE float number(const T &x) { return to_float(x); }
template<typename T> TILE void set_number(T &d, float x) { d.u = (uint16_t)pack<T>(x, 0.f); }
