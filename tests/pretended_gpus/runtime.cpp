// The CUDA runtime. The memory of the GPUs is memory of the host, and streams do their work at
// once. Only collectives run beside the program (nccl.cpp), so streams and events remember these.
#include <fcntl.h>
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstdarg>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <map>
#include <mutex>
#include <unordered_map>

#include "simulator.h"

using Clock = std::chrono::steady_clock;

struct CUstream_st {
    Jobs jobs;
    bool carries_nccl = false;
};
struct CUevent_st {
    Jobs jobs;
    bool is_after_nccl = false;
    Clock::time_point when;
};

namespace {
constexpr int MOST_GPUS = 64;
constexpr size_t MEMORY_OF_A_GPU = size_t(16) << 30;
constexpr auto PATIENCE = std::chrono::seconds(3);

// ---- Errors

thread_local cudaError_t last_error = cudaSuccess;

cudaError_t failed(cudaError_t error) {
    last_error = error;
    return error;
}

// ---- GPUs

// Return the GPUs that CUDA_VISIBLE_DEVICES leaves, by their numbers on this machine. As in CUDA,
// the list ends at the first entry that is no GPU.
std::vector<int> find_gpus() {
    int count = atoi(getenv("PRETEND_GPUS"));
    std::vector<int> found;
    const char* visible = getenv("CUDA_VISIBLE_DEVICES");
    if (!visible) {
        for (int gpu = 0; gpu < count; gpu++) found.push_back(gpu);
        return found;
    }
    for (const char* at = visible;; at++) {
        char* end;
        long gpu = strtol(at, &end, 10);
        if (end == at || gpu < 0 || gpu >= count) return found;
        found.push_back(gpu);
        if (*end != ',') return found;
        at = end;
    }
}

const std::vector<int>& gpus() {
    static const std::vector<int> found = find_gpus();
    return found;
}

thread_local int current = 0;
std::atomic<bool> has_context[MOST_GPUS];
std::atomic<size_t> used_bytes[MOST_GPUS];

// Since CUDA 12, cudaSetDevice makes the context of this process on the GPU. It takes hundreds of
// megabytes of a real GPU.
void make_context() {
    if (!has_context[current].exchange(true)) trace("context %d", current);
}

// ---- Memory

struct Block {
    size_t size;
    int gpu;
    bool is_host;  // pinned
};
std::mutex memory_mutex;
std::map<uintptr_t, Block> blocks;  // by their first address

void remember(void* address, Block block) {
    std::lock_guard lock(memory_mutex);
    blocks[uintptr_t(address)] = block;
}

// Return the block that contains the address. Without one, its size is 0.
Block find_block(const void* address) {
    std::lock_guard lock(memory_mutex);
    auto after = blocks.upper_bound(uintptr_t(address));
    if (after == blocks.begin()) return {};
    auto& [first, block] = *std::prev(after);
    return uintptr_t(address) < first + block.size ? block : Block{};
}

// ---- Streams

std::mutex mutex;  // of all streams, events and jobs
std::condition_variable job_done;
CUstream_st default_streams[MOST_GPUS];
Jobs jobs_of_gpu[MOST_GPUS];

bool is_default(cudaStream_t stream) {
    return stream == nullptr || stream == cudaStreamLegacy || stream == cudaStreamPerThread;
}

CUstream_st& get(cudaStream_t stream) {
    return is_default(stream) ? default_streams[current] : *stream;
}

void forget_done(Jobs& jobs) {
    auto is_done = [](const auto& job) { return job->done; };
    jobs.erase(std::remove_if(jobs.begin(), jobs.end(), is_done), jobs.end());
}

// The host waits for the collectives of a stream or an event.
void wait_for(const Jobs& given) {
    std::unique_lock lock(mutex);
    const Jobs jobs = given;
    for (auto& job : jobs) job_done.wait(lock, [&] { return job->done; });
}

// Work is about to be done that has to follow the collectives of a stream. If one of them hangs, as
// when a rank has died, a real GPU would hang too, while the host goes on and queues more. So go on
// after a while. Nobody reads the wrong numbers, because wait_for() still waits.
void wait_before_work(cudaStream_t stream) {
    std::unique_lock lock(mutex);
    const Jobs jobs = get(stream).jobs;
    for (auto& job : jobs) {
        if (job->is_stuck) continue;
        if (!job_done.wait_for(lock, PATIENCE, [&] { return job->done; })) {
            job->is_stuck = true;
            say("a collective hangs, and the host goes on");
        }
    }
    forget_done(get(stream).jobs);
}

cudaError_t copy(void* to, const void* from, size_t size) {
    auto name = [](const Block& block) {
        return block.size == 0 ? "pageable" : block.is_host ? "pinned" : "gpu";
    };
    trace("copy %s to %s", name(find_block(from)), name(find_block(to)));
    memmove(to, from, size);
    return cudaSuccess;
}

// ---- Kernels

std::unordered_map<const void*, std::string>& kernel_names() {
    static auto* names = new std::unordered_map<const void*, std::string>;  // outlives everything
    return *names;
}

cudaError_t launch(const void* kernel) {
    say("a kernel is not simulated: %.300s", kernel_names()[kernel].c_str());
    return failed(cudaErrorNotSupported);
}
}  // namespace

// ---- For the other files

void trace(const char* format, ...) {
    static const char* path = getenv("PRETEND_TRACE");
    if (!path) return;
    static const int file = open(path, O_WRONLY | O_CREAT | O_APPEND, 0666);
    static const char* rank = getenv("RANK");
    char line[200];
    int length = snprintf(line, sizeof line, "%s ", rank ? rank : "0");
    va_list arguments;
    va_start(arguments, format);
    vsnprintf(line + length, sizeof line - length, format, arguments);
    va_end(arguments);
    dprintf(file, "%s\n", line);
}

void say(const char* format, ...) {
    char text[500];
    va_list arguments;
    va_start(arguments, format);
    vsnprintf(text, sizeof text, format, arguments);
    va_end(arguments);
    dprintf(STDERR_FILENO, "[pretended GPUs] %s\n", text);
}

void enqueue(cudaStream_t stream, const std::shared_ptr<Job>& job) {
    std::lock_guard lock(mutex);
    for (Jobs* jobs : {&get(stream).jobs, &jobs_of_gpu[current]}) {
        forget_done(*jobs);
        jobs->push_back(job);
    }
    get(stream).carries_nccl = true;
}

void finish(const std::shared_ptr<Job>& job) {
    std::lock_guard lock(mutex);
    job->done = true;
    job_done.notify_all();
}

int physical_gpu() { return gpus()[current]; }

bool is_on_gpu(const void* address) {
    Block block = find_block(address);
    return block.size > 0 && !block.is_host;
}

// For torch/operations.cpp, which does the work of kernels.
API void pretend_wait_before_work(cudaStream_t stream) { wait_before_work(stream); }

// For driver.cpp.
bool context_exists(int gpu) { return has_context[gpu]; }

// ---- GPUs

API cudaError_t cudaGetDeviceCount(int* count) {
    *count = gpus().size();
    return *count > 0 ? cudaSuccess : failed(cudaErrorNoDevice);
}

API cudaError_t cudaGetDevice(int* gpu) {
    *gpu = current;
    return gpus().empty() ? failed(cudaErrorNoDevice) : cudaSuccess;
}

API cudaError_t cudaSetDevice(int gpu) {
    if (gpu < 0 || gpu >= int(gpus().size())) return failed(cudaErrorInvalidDevice);
    current = gpu;
    make_context();
    return cudaSuccess;
}

API cudaError_t cudaGetDeviceProperties(cudaDeviceProp* properties, int gpu) {
    if (gpu < 0 || gpu >= int(gpus().size())) return failed(cudaErrorInvalidDevice);
    *properties = {};
    snprintf(properties->name, sizeof properties->name, "Pretended GPU %d", gpus()[gpu]);
    properties->totalGlobalMem = MEMORY_OF_A_GPU;
    properties->major = 9;
    properties->multiProcessorCount = 132;
    properties->warpSize = 32;
    properties->maxThreadsPerBlock = 1024;
    properties->maxThreadsPerMultiProcessor = 2048;
    properties->regsPerMultiprocessor = 65536;
    properties->sharedMemPerBlock = 48 << 10;
    properties->sharedMemPerMultiprocessor = 228 << 10;
    properties->l2CacheSize = 50 << 20;
    properties->pciBusID = gpus()[gpu] + 1;
    properties->uuid.bytes[15] = gpus()[gpu] + 1;
    return cudaSuccess;
}

API cudaError_t cudaDeviceGetAttribute(int* value, cudaDeviceAttr attribute, int gpu) {
    switch (attribute) {
        case cudaDevAttrComputeCapabilityMajor: *value = 9; break;
        case cudaDevAttrMultiProcessorCount: *value = 132; break;
        case cudaDevAttrMaxThreadsPerBlock: *value = 1024; break;
        case cudaDevAttrPciBusId: *value = gpus()[gpu] + 1; break;
        default: *value = 0;
    }
    return cudaSuccess;
}

API cudaError_t cudaDeviceGetPCIBusId(char* text, int size, int gpu) {
    snprintf(text, size, "0000:%02x:00.0", gpus()[gpu] + 1);
    return cudaSuccess;
}

// Without access to each other's memory, PyTorch copies between GPUs in its most general way.
API cudaError_t cudaDeviceCanAccessPeer(int* can, int, int) {
    *can = 0;
    return cudaSuccess;
}

API cudaError_t cudaDeviceGetStreamPriorityRange(int* least, int* greatest) {
    *least = 0;
    *greatest = -5;
    return cudaSuccess;
}

API cudaError_t cudaDriverGetVersion(int* version) {
    *version = CUDART_VERSION;
    return cudaSuccess;
}

API cudaError_t cudaRuntimeGetVersion(int* version) {
    *version = CUDART_VERSION;
    return cudaSuccess;
}

API cudaError_t cudaDeviceSynchronize() {
    trace("wait for the GPU");
    wait_for(jobs_of_gpu[current]);
    return cudaSuccess;
}

// ---- Errors

API cudaError_t cudaGetLastError() {
    cudaError_t error = last_error;
    last_error = cudaSuccess;
    return error;
}

API cudaError_t cudaPeekAtLastError() { return last_error; }

API const char* cudaGetErrorName(cudaError_t) { return "an error of the pretended GPUs"; }

API const char* cudaGetErrorString(cudaError_t error) {
    switch (error) {
        case cudaSuccess: return "no error";
        case cudaErrorNoDevice: return "no CUDA-capable device is detected";
        case cudaErrorInvalidDevice: return "invalid device ordinal";
        case cudaErrorMemoryAllocation: return "out of memory";
        case cudaErrorNotReady: return "device not ready";
        default: return "something that the pretended GPUs do not have";
    }
}

// ---- Memory

API cudaError_t cudaMalloc(void** address, size_t size) {
    make_context();
    if (used_bytes[current] + size > MEMORY_OF_A_GPU) return failed(cudaErrorMemoryAllocation);
    constexpr int kind = MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE;
    *address = mmap(nullptr, size, PROT_READ | PROT_WRITE, kind, -1, 0);
    if (*address == MAP_FAILED) return failed(cudaErrorMemoryAllocation);
    used_bytes[current] += size;
    remember(*address, {size, current, false});
    return cudaSuccess;
}

API cudaError_t cudaFree(void* address) {
    Block block = find_block(address);
    if (block.size == 0) return cudaSuccess;
    used_bytes[block.gpu] -= block.size;
    std::lock_guard lock(memory_mutex);
    blocks.erase(uintptr_t(address));
    munmap(address, block.size);
    return cudaSuccess;
}

API cudaError_t cudaHostAlloc(void** address, size_t size, unsigned) {
    make_context();
    if (posix_memalign(address, 4096, size)) return failed(cudaErrorMemoryAllocation);
    remember(*address, {size, current, true});
    return cudaSuccess;
}

API cudaError_t cudaFreeHost(void* address) {
    std::lock_guard lock(memory_mutex);
    blocks.erase(uintptr_t(address));
    free(address);
    return cudaSuccess;
}

API cudaError_t cudaHostRegister(void* address, size_t size, unsigned) {
    remember(address, {size, current, true});
    return cudaSuccess;
}

API cudaError_t cudaHostUnregister(void* address) {
    std::lock_guard lock(memory_mutex);
    blocks.erase(uintptr_t(address));
    return cudaSuccess;
}

API cudaError_t cudaMemGetInfo(size_t* free_bytes, size_t* total_bytes) {
    *free_bytes = MEMORY_OF_A_GPU - used_bytes[current];
    *total_bytes = MEMORY_OF_A_GPU;
    return cudaSuccess;
}

API cudaError_t cudaPointerGetAttributes(cudaPointerAttributes* attributes, const void* address) {
    Block block = find_block(address);
    *attributes = {};
    if (block.size == 0) {
        attributes->type = cudaMemoryTypeUnregistered;
        return cudaSuccess;
    }
    attributes->type = block.is_host ? cudaMemoryTypeHost : cudaMemoryTypeDevice;
    attributes->device = block.gpu;
    attributes->devicePointer = const_cast<void*>(address);
    attributes->hostPointer = block.is_host ? const_cast<void*>(address) : nullptr;
    return cudaSuccess;
}

API cudaError_t cudaMemcpyAsync(void* to, const void* from, size_t size, cudaMemcpyKind,
                                cudaStream_t stream) {
    wait_before_work(stream);
    return copy(to, from, size);
}

API cudaError_t cudaMemcpy(void* to, const void* from, size_t size, cudaMemcpyKind) {
    trace("wait for a copy");
    wait_for(get(nullptr).jobs);
    return copy(to, from, size);
}

API cudaError_t cudaMemcpyPeerAsync(void* to, int, const void* from, int, size_t size,
                                    cudaStream_t stream) {
    wait_before_work(stream);
    return copy(to, from, size);
}

API cudaError_t cudaMemsetAsync(void* to, int value, size_t size, cudaStream_t stream) {
    wait_before_work(stream);
    memset(to, value, size);
    return cudaSuccess;
}

// ---- Streams and events. None is ever freed, because others may still look at it.

API cudaError_t cudaStreamCreateWithPriority(cudaStream_t* stream, unsigned, int) {
    make_context();
    *stream = new CUstream_st;
    return cudaSuccess;
}

API cudaError_t cudaStreamDestroy(cudaStream_t) { return cudaSuccess; }

API cudaError_t cudaStreamGetPriority(cudaStream_t, int* priority) {
    *priority = 0;
    return cudaSuccess;
}

API cudaError_t cudaStreamSynchronize(cudaStream_t stream) {
    trace("wait for a stream");
    wait_for(get(stream).jobs);
    return cudaSuccess;
}

API cudaError_t cudaStreamQuery(cudaStream_t stream) {
    std::lock_guard lock(mutex);
    forget_done(get(stream).jobs);
    return get(stream).jobs.empty() ? cudaSuccess : failed(cudaErrorNotReady);
}

API cudaError_t cudaStreamWaitEvent(cudaStream_t stream, cudaEvent_t event, unsigned) {
    std::lock_guard lock(mutex);
    if (is_default(stream) && event->is_after_nccl) trace("the compute stream waits for NCCL");
    Jobs& jobs = get(stream).jobs;
    for (auto& job : event->jobs) {
        bool is_new = std::find(jobs.begin(), jobs.end(), job) == jobs.end();
        if (is_new && !job->done) jobs.push_back(job);
    }
    return cudaSuccess;
}

API cudaError_t cudaStreamIsCapturing(cudaStream_t, cudaStreamCaptureStatus* status) {
    *status = cudaStreamCaptureStatusNone;
    return cudaSuccess;
}

API cudaError_t cudaStreamGetCaptureInfo(cudaStream_t, cudaStreamCaptureStatus* status,
                                         unsigned long long*, cudaGraph_t*, const cudaGraphNode_t**,
                                         const cudaGraphEdgeData**, size_t*) {
    *status = cudaStreamCaptureStatusNone;
    return cudaSuccess;
}

API cudaError_t cudaThreadExchangeStreamCaptureMode(cudaStreamCaptureMode*) { return cudaSuccess; }

API cudaError_t cudaEventCreateWithFlags(cudaEvent_t* event, unsigned) {
    *event = new CUevent_st;
    return cudaSuccess;
}

API cudaError_t cudaEventDestroy(cudaEvent_t) { return cudaSuccess; }

API cudaError_t cudaEventRecordWithFlags(cudaEvent_t event, cudaStream_t stream, unsigned) {
    make_context();
    std::lock_guard lock(mutex);
    event->jobs = get(stream).jobs;
    event->is_after_nccl = get(stream).carries_nccl;
    event->when = Clock::now();
    return cudaSuccess;
}

API cudaError_t cudaEventRecord(cudaEvent_t event, cudaStream_t stream) {
    return cudaEventRecordWithFlags(event, stream, 0);
}

API cudaError_t cudaEventQuery(cudaEvent_t event) {
    std::lock_guard lock(mutex);
    forget_done(event->jobs);
    return event->jobs.empty() ? cudaSuccess : failed(cudaErrorNotReady);
}

API cudaError_t cudaEventSynchronize(cudaEvent_t event) {
    trace("wait for an event");
    wait_for(event->jobs);
    return cudaSuccess;
}

API cudaError_t cudaEventElapsedTime(float* milliseconds, cudaEvent_t begin, cudaEvent_t end) {
    *milliseconds = std::chrono::duration<float, std::milli>(end->when - begin->when).count();
    return cudaSuccess;
}

// ---- Kernels, which the operations of operations.cpp replace

API cudaError_t cudaLaunchKernel(const void* kernel, dim3, dim3, void**, size_t, cudaStream_t) {
    return launch(kernel);
}

API cudaError_t __cudaLaunchKernel(const void* kernel, dim3, dim3, void**, size_t, cudaStream_t) {
    return launch(kernel);
}

API cudaError_t cudaLaunchKernelExC(const cudaLaunchConfig_t*, const void* kernel, void**) {
    return launch(kernel);
}

API unsigned __cudaPushCallConfiguration(dim3, dim3, size_t, cudaStream_t) { return 0; }

API cudaError_t __cudaPopCallConfiguration(dim3* grid, dim3* block, size_t* bytes, void* stream) {
    *grid = {1, 1, 1};
    *block = {1, 1, 1};
    *bytes = 0;
    *static_cast<cudaStream_t*>(stream) = nullptr;
    return cudaSuccess;
}

// ---- What the libraries of PyTorch call when they are loaded

API void** __cudaRegisterFatBinary(void*) {
    static void* handle;
    return &handle;
}
API void __cudaRegisterFatBinaryEnd(void**) {}
API void __cudaUnregisterFatBinary(void**) {}
API void __cudaRegisterFunction(void**, const char* kernel, char*, const char* name, int, void*,
                                void*, void*, void*, int*) {
    kernel_names()[kernel] = name;
}
API void __cudaRegisterVar(void**, char*, char*, const char*, int, size_t, int, int) {}

API cudaError_t cudaGetDriverEntryPointByVersion(const char*, void** function, unsigned,
                                                 unsigned long long,
                                                 cudaDriverEntryPointQueryResult* result) {
    *function = nullptr;
    if (result) *result = cudaDriverEntryPointSymbolNotFound;
    return cudaErrorNotSupported;
}
