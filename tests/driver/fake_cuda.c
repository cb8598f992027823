// fake_cuda.c - a libcuda.so.1 without a GPU: enough of the driver's ABI to see what qwen_raw.driver asks of it.
//
// Device memory is host memory, streams run at once, a launch only records its geometry, attributes and parameters.
// Every call is appended to a log that the test reads. fake_fail(name, status) makes the next call of `name` fail.
#include <dlfcn.h>
#include <stdarg.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

typedef int R;
typedef unsigned long long Ptr;
static void *body_graph = (void*)0x5000, *body_graphs[1];
static char log_text[1 << 20];
static size_t log_len;
static char fail_name[64];
static int fail_status, capturing, context_set = -1, mode_now, devices = 2, version = 13000;

static int note(const char* name, const char* format, ...) {
  va_list args;
  va_start(args, format);
  log_len += snprintf(log_text + log_len, sizeof log_text - log_len, "%s ", name);
  log_len += vsnprintf(log_text + log_len, sizeof log_text - log_len, format, args);
  va_end(args);
  log_text[log_len++] = '\n', log_text[log_len] = 0;
  if (strcmp(name, fail_name)) return 0;
  fail_name[0] = 0;
  return fail_status;
}
#define NOTE(...)                                    \
  do {                                               \
    int status_ = note(__func__, __VA_ARGS__);       \
    if (status_) return status_;                     \
  } while (0)
// What the real driver refuses during a thread-local capture, for this thread, unless the mode was relaxed.
#define UNSAFE \
  if (capturing && mode_now != 2) return 900

// ---- for the test
const char* fake_log(void) { return log_text; }
void fake_clear(void) { log_text[log_len = 0] = 0; }
void fake_fail(const char* name, int status) { snprintf(fail_name, sizeof fail_name, "%s", name), fail_status = status; }
void fake_devices(int count) { devices = count; }
void fake_version(int v) { version = v; }
typedef struct { int count, size[8]; } Fn;  // a kernel: the sizes of its parameters

// ---- the driver
R cuInit(unsigned flags) { NOTE("%u", flags); return devices ? 0 : 100; }
R cuDriverGetVersion(int* v) { *v = version; return 0; }
R cuGetErrorString(R e, const char** s) { *s = e == 2 ? "out of memory" : e == 1 ? "invalid argument" : "some text"; return 0; }
R cuGetErrorName(R e, const char** s) { *s = "NAME"; return 0; }
R cuDeviceGetCount(int* n) { *n = devices; return 0; }
R cuDeviceGet(int* d, int i) { *d = i; return 0; }
R cuDeviceGetName(char* s, int n, int d) { snprintf(s, n, "Fake GPU"); return 0; }
R cuDeviceGetPCIBusId(char* s, int n, int d) { snprintf(s, n, "0000:0%d:00.0", d); return 0; }
R cuDeviceTotalMem_v2(size_t* n, int d) { *n = 1 << 30; return 0; }
R cuDeviceGetAttribute(int* v, int a, int d) {
  *v = a == 75 ? 9 : a == 76 ? 0 : a == 16 ? 132 : a == 97 ? 232448 : a == 98 ? 0 : 1;
  return 0;
}
R cuDevicePrimaryCtxRetain(void** c, int d) { NOTE("%d", d); *c = (void*)(uintptr_t)(0x100 + d); return 0; }
R cuDevicePrimaryCtxRelease_v2(int d) { NOTE("%d", d); return 0; }
R cuCtxSetCurrent(void* c) { context_set = (int)(uintptr_t)c - 0x100; return 0; }
R cuCtxEnablePeerAccess(void* c, unsigned f) { NOTE("%d %d", context_set, (int)(uintptr_t)c - 0x100); return 0; }
R cuDeviceGetP2PAttribute(int* v, int kind, int a, int b) { *v = kind == 3; return 0; }  // native atomics
R cuDeviceCanAccessPeer(int* ok, int a, int b) { *ok = 1; return 0; }
R cuMemAlloc_v2(Ptr* p, size_t n) { UNSAFE; NOTE("%zu", n); *p = (Ptr)(uintptr_t)malloc(n); return 0; }
R cuMemFree_v2(Ptr p) { UNSAFE; NOTE("%d", context_set); free((void*)(uintptr_t)p); return 0; }
R cuMemGetInfo_v2(size_t* f, size_t* t) { *f = 1 << 29, *t = 1 << 30; return 0; }
R cuMemHostAlloc(void** p, size_t n, unsigned f) { UNSAFE; NOTE("%zu %u", n, f); *p = malloc(n); return 0; }
R cuMemFreeHost(void* p) { UNSAFE; NOTE("%d", context_set); free(p); return 0; }
R cuMemHostGetDevicePointer_v2(Ptr* d, void* p, unsigned f) { *d = (Ptr)(uintptr_t)p; return 0; }
R cuMemcpyHtoDAsync_v2(Ptr d, const void* s, size_t n, void* st) { NOTE("%zu", n); memcpy((void*)(uintptr_t)d, s, n); return 0; }
R cuMemcpyDtoHAsync_v2(void* d, Ptr s, size_t n, void* st) { NOTE("%zu", n); memcpy(d, (void*)(uintptr_t)s, n); return 0; }
R cuMemsetD8Async(Ptr d, unsigned char c, size_t n, void* st) {
  NOTE("%d %zu", c, n);
  if (!capturing) memset((void*)(uintptr_t)d, c, n);
  return 0;
}
R cuStreamCreate(void** s, unsigned f) { NOTE("%u", f); *s = malloc(1); return 0; }
R cuStreamDestroy_v2(void* s) { NOTE(""); free(s); return 0; }
R cuStreamSynchronize(void* s) { UNSAFE; NOTE(""); return 0; }
R cuStreamQuery(void* s) { return note(__func__, ""); }
R cuStreamWaitEvent(void* s, void* e, unsigned f) { NOTE("%u", f); return 0; }
R cuStreamWaitValue32_v2(void* s, Ptr a, unsigned v, unsigned f) { NOTE("%u %u", v, f); return 0; }
R cuStreamWriteValue32_v2(void* s, Ptr a, unsigned v, unsigned f) { NOTE("%u %u", v, f); *(unsigned*)(uintptr_t)a = v; return 0; }
R cuEventCreate(void** e, unsigned f) { NOTE("%u", f); *e = malloc(1); return 0; }
R cuEventRecord(void* e, void* s) { NOTE(""); return 0; }
R cuEventQuery(void* e) { return note(__func__, ""); }
R cuEventSynchronize(void* e) { UNSAFE; NOTE(""); return 0; }
R cuEventElapsedTime(float* ms, void* a, void* b) { *ms = 1.5f; return 0; }
R cuEventElapsedTime_v2(float* ms, void* a, void* b) { *ms = 1.5f; return 0; }
R cuEventDestroy_v2(void* e) { NOTE(""); free(e); return 0; }
R cuThreadExchangeStreamCaptureMode(int* mode) { int old = mode_now; mode_now = *mode, *mode = old; return 0; }
R cuStreamBeginCapture_v2(void* s, int mode) { NOTE("%d", mode); capturing = 1; return 0; }
R cuStreamEndCapture(void* s, void** g) {
  const int into = capturing == 2;
  capturing = 0;
  NOTE("");
  *g = into ? body_graph : malloc(1);
  return 0;
}
R cuStreamBeginCaptureToGraph(void* s, void* g, void** deps, void* data, size_t n, int mode) { NOTE("%d", mode); capturing = 2; return 0; }
R cuGraphCreate(void** g, unsigned f) { NOTE("%u", f); *g = malloc(1); return 0; }
R cuGraphConditionalHandleCreate(uint64_t* h, void* g, void* c, unsigned value, unsigned f) {
  NOTE("%d %u %u", (int)(uintptr_t)c - 0x100, value, f);
  *h = 0x77;
  return 0;
}
typedef struct { int type, pad[3]; uint64_t handle; int kind; unsigned size; void*** graphs; void* context; } Conditional;
R cuGraphAddNode_v2(void** node, void* g, void* const* deps, const void* data, size_t n, Conditional* p) {
  NOTE("after %zu type %d handle %#llx kind %d size %u context %d", n, p->type, (unsigned long long)p->handle, p->kind, p->size,
       (int)(uintptr_t)p->context - 0x100);
  body_graphs[0] = body_graph, p->graphs = (void***)body_graphs;
  return 0;
}
R cuGraphGetNodes(void* g, void** nodes, size_t* n) {
  for (size_t i = 0; nodes && i < *n; i++) nodes[i] = (void*)(0x600 + i);
  *n = 3;
  return 0;
}
R cuGraphInstantiateWithFlags(void** x, void* g, unsigned long long f) { NOTE("%llu", f); *x = malloc(1); return 0; }
R cuGraphLaunch(void* x, void* s) { NOTE(""); return 0; }
R cuGraphDestroy(void* g) { NOTE(""); free(g); return 0; }
R cuGraphExecDestroy(void* x) { NOTE(""); free(x); return 0; }
R cuFuncLoad(void* f) { NOTE(""); return 0; }
static int smem_allowed = 48 << 10;
R cuFuncSetAttribute(void* f, int a, int v) { NOTE("%d %d", a, v); smem_allowed = v; return 0; }
R cuFuncGetAttribute(int* v, int a, void* f) { *v = smem_allowed; return 0; }

typedef struct { int id; char pad[4]; union { int one; struct { unsigned x, y, z; } dim; char pad[64]; } value; } Attribute;
typedef struct { unsigned grid[3], block[3], smem; void* stream; Attribute* attrs; unsigned count; } Config;
R cuLaunchKernelEx(const Config* c, const Fn* f, void** params, void** extra) {
  char text[4096];
  int n = snprintf(text, sizeof text, "grid %u,%u,%u block %u,%u,%u smem %u", c->grid[0], c->grid[1], c->grid[2], c->block[0],
                   c->block[1], c->block[2], c->smem);
  for (unsigned i = 0; i < c->count; i++) {
    const Attribute* a = c->attrs + i;
    n += a->id == 4 ? snprintf(text + n, sizeof text - n, " cluster %u,%u,%u", a->value.dim.x, a->value.dim.y, a->value.dim.z)
                    : snprintf(text + n, sizeof text - n, " attribute %d=%d", a->id, a->value.one);
  }
  n += snprintf(text + n, sizeof text - n, " params");
  for (int i = 0; i < f->count; i++) {
    n += snprintf(text + n, sizeof text - n, " ");
    for (int b = 0; b < f->size[i]; b++) n += snprintf(text + n, sizeof text - n, "%02x", ((unsigned char*)params[i])[b]);
  }
  NOTE("%s", text);
  return 0;
}
// The compiler asks for these when it finds a driver in its process; it does without.
R cuGetExportTable(const void** table, const void* id) { *table = NULL; return 500; }
static void* find(const char* name) {
  static const char* const suffix[] = {"_v2", ""};
  char whole[128];
  void* self = dlopen("libcuda.so.1", RTLD_NOLOAD | RTLD_NOW);
  for (int i = 0; i < 2; i++) {
    snprintf(whole, sizeof whole, "%s%s", name, suffix[i]);
    void* f = dlsym(self, whole);
    if (f) return f;
  }
  return !strcmp(name, "cuGraphInstantiate") ? (void*)cuGraphInstantiateWithFlags : NULL;
}
R cuGetProcAddress_v2(const char* name, void** f, int version, uint64_t flags, int* status) {
  *f = find(name);
  if (status) *status = *f ? 0 : 1;
  return *f ? 0 : 500;
}
R cuGetProcAddress(const char* name, void** f, int version, uint64_t flags) { return cuGetProcAddress_v2(name, f, version, flags, NULL); }
