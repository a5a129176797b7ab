// The CPU backend: clusters of blocks over threads. In a process with OpenMP (PyTorch has loaded one) they are
// OpenMP's: two pools would compete for the cores, since OpenMP's threads spin for a while after each piece of work.
// Elsewhere they are a pool of our own, which grows on demand, never shrinks, and starts anew after a fork.
#define _GNU_SOURCE
#include <dlfcn.h>
#include <pthread.h>
#include <sched.h>
#include <signal.h>
#include <stdatomic.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>
#include "runtime/cpu.h"

enum { MAX_THREADS = 1024 };
static const char isa_variable[] = "MARGAY_ISA";

// ---- instruction sets

const char *mg_isa_name(mg_isa isa) {
  static const char *const names[MG_ISA_COUNT] = {"base", "avx2", "avx512"};
  return names[isa];
}

static mg_isa detect_isa(void) {
  mg_isa best = MG_ISA_BASE;
#ifdef __x86_64__
  __builtin_cpu_init();
  // every CPU with AVX2 has F16C
  if (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma")) best = MG_ISA_AVX2;
  if (best && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
      __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512bf16"))
    best = MG_ISA_AVX512;
#endif
  const char *wish = getenv(isa_variable);
  for (mg_isa i = MG_ISA_BASE; wish && i < best; i++)
    if (!strcmp(wish, mg_isa_name(i))) return i;
  return best;
}

mg_isa mg_host_isa(void) {
  static atomic_int known = -1;   // racing threads find the same value
  int isa = atomic_load_explicit(&known, memory_order_relaxed);
  if (isa < 0) atomic_store_explicit(&known, isa = (int)detect_isa(), memory_order_relaxed);
  return (mg_isa)isa;
}

mg_status mg_check_isa(void) {
  static atomic_int known;          // 1: checked, racing threads find the same
  if (atomic_load_explicit(&known, memory_order_relaxed)) return MG_OK;
  const char *wish = getenv(isa_variable);
  bool found = !wish || !*wish;
  for (mg_isa i = MG_ISA_BASE; !found && i < MG_ISA_COUNT; i++) found = !strcmp(wish, mg_isa_name(i));
  if (!found)
    return mg_fail(MG_VALUE, "the environment's %s is %.40s, expected base, avx2 or avx512", isa_variable, wish);
  atomic_store_explicit(&known, 1, memory_order_relaxed);
  return MG_OK;
}

// ---- how many threads

static atomic_int wanted_threads;   // 0: the default

static int default_threads(void) {
  static atomic_int known;
  int n = atomic_load_explicit(&known, memory_order_relaxed);
  if (n) return n;
  const char *openmp = getenv("OMP_NUM_THREADS");
  char *end = NULL;                 // of a number; a list has one for each level of nesting
  const long wish = openmp ? strtol(openmp, &end, 10) : 0;
  if (wish > 0 && wish <= MAX_THREADS && strchr(", \t", *end)) n = (int)wish;   // strchr finds the text's end too
#ifdef __linux__
  cpu_set_t cores;
  if (n < 1 && !sched_getaffinity(0, sizeof cores, &cores)) n = CPU_COUNT(&cores);
#endif
  if (n < 1) n = (int)sysconf(_SC_NPROCESSORS_ONLN);
  n = n < 1 ? 1 : n > MAX_THREADS ? MAX_THREADS : n;
  atomic_store_explicit(&known, n, memory_order_relaxed);
  return n;
}

typedef void parallel_fn(void (*body)(void *), void *data, unsigned threads, unsigned flags);
static atomic_bool in_a_fork;       // GNU's runtime waits forever there for its parent's threads

// OpenMP's entry point for a parallel region; GNU's, LLVM's and Intel's runtimes have it. NULL in a process without
// OpenMP. It may be loaded after us, so its absence is not remembered.
static parallel_fn *find_openmp(void) {
  static atomic_uintptr_t known;
  if (atomic_load_explicit(&in_a_fork, memory_order_relaxed)) return NULL;
  uintptr_t at = atomic_load_explicit(&known, memory_order_relaxed);
  if (!at) atomic_store_explicit(&known, at = (uintptr_t)dlsym(RTLD_DEFAULT, "GOMP_parallel"), memory_order_relaxed);
  return (parallel_fn *)at;
}

void mg_set_num_threads(int n) {
  atomic_store_explicit(&wanted_threads, n < 0 ? 0 : n > MAX_THREADS ? MAX_THREADS : n, memory_order_relaxed);
}

int mg_num_threads(void) {
  int n = atomic_load_explicit(&wanted_threads, memory_order_relaxed);
  return n ? n : default_threads();
}

// ---- the pool

typedef struct job {                // lives on its caller's stack; the caller leaves only when no helper is inside
  const mg_kernel_desc *desc;
  const void *params;
  int blocks, clusters;
  atomic_int next;                  // cluster that nobody has taken yet
  atomic_size_t lacks;              // bytes that a thread did not get
  int helpers, helpers_wanted;      // pool threads inside, and how many may be; under the lock
  struct job *link;
} job;

typedef struct pool {
  pthread_mutex_t lock;
  pthread_cond_t work, done;
  job *jobs;
  int threads;
} pool;
static const pool empty_pool = {PTHREAD_MUTEX_INITIALIZER, PTHREAD_COND_INITIALIZER, PTHREAD_COND_INITIALIZER, NULL, 0};
static pool the_pool = {PTHREAD_MUTEX_INITIALIZER, PTHREAD_COND_INITIALIZER, PTHREAD_COND_INITIALIZER, NULL, 0};

extern _Thread_local size_t mg_machine_lacks;   // of tile/cpu/fiber.h

// False without the memory that a cluster needs. A thread gets it before it takes one: what was taken has to run, for
// others may wait for it.
static bool take_part(job *j) {
  const int cluster = (int)j->desc->cluster;
  mg_machine_lacks = 0;
  j->desc->run(j->params, 0, 0);
  if (mg_machine_lacks) {
    atomic_store(&j->lacks, mg_machine_lacks);
    return false;
  }
  for (int i; (i = atomic_fetch_add_explicit(&j->next, 1, memory_order_relaxed)) < j->clusters;)
    j->desc->run(j->params, i * cluster, j->blocks);
  return true;
}

static job *job_wanting_help(void) {
  job *j = the_pool.jobs;
  while (j && (j->helpers == j->helpers_wanted || atomic_load_explicit(&j->next, memory_order_relaxed) >= j->clusters))
    j = j->link;
  return j;
}

static void *helper(void *unused) {
  pthread_mutex_lock(&the_pool.lock);
  for (;;) {
    job *j = job_wanting_help();
    if (!j) {
      pthread_cond_wait(&the_pool.work, &the_pool.lock);
      continue;
    }
    j->helpers++;
    pthread_mutex_unlock(&the_pool.lock);
    const bool took_part = take_part(j);
    pthread_mutex_lock(&the_pool.lock);
    if (!took_part) j->helpers_wanted--;
    if (!--j->helpers) pthread_cond_broadcast(&the_pool.done);
  }
  return unused;
}

// In the child of a fork only the calling thread exists; the lock may have been held by another one.
static void after_fork(void) {
  the_pool = empty_pool;
  atomic_store_explicit(&in_a_fork, true, memory_order_relaxed);
}
__attribute__((constructor)) static void watch_fork(void) { pthread_atfork(NULL, NULL, after_fork); }

// Under the lock. Fewer threads than asked for, where the system gives no more, are no error: the caller works too.
static void grow(int threads) {
  sigset_t all, old;                // signals are for the application's own threads
  sigfillset(&all);
  pthread_sigmask(SIG_SETMASK, &all, &old);
  for (pthread_t id; the_pool.threads < threads && !pthread_create(&id, NULL, helper, NULL); the_pool.threads++)
    pthread_detach(id);
  pthread_sigmask(SIG_SETMASK, &old, NULL);
}

static mg_status outcome(const job *j, const mg_kernel *row) {
  if (atomic_load_explicit(&j->next, memory_order_relaxed) >= j->clusters) return MG_OK;
  return mg_fail(MG_MEMORY, "%s: out of memory, the kernel %s on the CPU could not get %zu bytes", mg_op_name(row->op),
                 row->name, atomic_load(&j->lacks));
}

static void member(void *j) { take_part(j); }

mg_status mg_cpu_run(const mg_kernel *row, const void *params, int blocks) {
  const mg_kernel_desc *desc = mg_desc(row);
  const int threads = mg_num_threads();
  job j = {.desc = desc, .params = params, .blocks = blocks, .clusters = blocks / (int)desc->cluster};
  j.helpers_wanted = (threads < j.clusters ? threads : j.clusters) - 1;
  if (j.helpers_wanted < 1) {
    take_part(&j);
    return outcome(&j, row);
  }
  parallel_fn *parallel = find_openmp();
  if (parallel) {
    parallel(member, &j, (unsigned)j.helpers_wanted + 1, 0);
    return outcome(&j, row);
  }
  pthread_mutex_lock(&the_pool.lock);
  if (the_pool.threads < j.helpers_wanted) grow(j.helpers_wanted);
  j.link = the_pool.jobs;
  the_pool.jobs = &j;
  pthread_cond_broadcast(&the_pool.work);
  pthread_mutex_unlock(&the_pool.lock);
  take_part(&j);
  pthread_mutex_lock(&the_pool.lock);
  job **at = &the_pool.jobs;
  while (*at != &j) at = &(*at)->link;
  *at = j.link;
  while (j.helpers) pthread_cond_wait(&the_pool.done, &the_pool.lock);
  pthread_mutex_unlock(&the_pool.lock);
  return outcome(&j, row);
}
