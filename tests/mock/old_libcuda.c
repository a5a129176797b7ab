// A driver from before CUDA 12: it has no cuGetProcAddress_v2.
int cuInit(unsigned flags);
int cuInit(unsigned flags) { return (int)flags; }
