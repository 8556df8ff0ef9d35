// NCCL between processes of one machine, and between GPUs of one process. Each communicator has a
// thread, which does the collectives in their order. The ranks exchange their data through memory
// that they share, a piece at a time.
#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <fcntl.h>
#include <nccl.h>
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstdlib>
#include <cstring>
#include <deque>
#include <functional>
#include <mutex>
#include <thread>

#include "simulator.h"

namespace {
constexpr size_t PIECE = size_t(4) << 20;  // bytes of each rank
constexpr int MOST_RANKS = 16;
constexpr auto LONGEST_START = std::chrono::minutes(10);

// What the ranks of a communicator share.
struct Exchange {
    struct Rank {
        std::atomic<bool> is_here;
        std::atomic<int> gpu;
        std::atomic<uint64_t> barriers;  // how many it has reached
        uint64_t call;                   // a number for the collective that it is in
        std::atomic<int> addressee;      // who may read its data, plus one, or 0
    };
    Rank ranks[MOST_RANKS];
    char data[MOST_RANKS][PIECE];
};

enum class Collective { ALL_REDUCE, REDUCE, BROADCAST, ALL_GATHER, REDUCE_SCATTER, SEND, RECEIVE };

struct Arguments {
    Collective collective;
    const char* send;
    char* receive;
    size_t count;
    ncclDataType_t type;
    ncclRedOp_t op;
    int root;  // or the other rank of a SEND or RECEIVE
};

std::string last_error;

ncclResult_t failed(ncclResult_t result, const std::string& why) {
    last_error = why;
    return result;
}

size_t size_of(ncclDataType_t type) {
    switch (type) {
        case ncclInt8:
        case ncclUint8: return 1;
        case ncclFloat16:
        case ncclBfloat16: return 2;
        case ncclInt32:
        case ncclUint32:
        case ncclFloat32: return 4;
        default: return 8;
    }
}
}  // namespace

struct ncclComm {
    int rank;
    int size;
    Exchange* exchange;
    std::atomic<bool> is_aborted{false};
    uint64_t barriers = 0;

    std::mutex mutex;  // of the queue
    std::condition_variable queued;
    std::deque<std::pair<Arguments, std::shared_ptr<Job>>> queue;
    bool is_closed = false;

    // Wait until all ranks are here. Return false if the communicator was aborted meanwhile.
    bool barrier(uint64_t call) {
        Exchange::Rank& own = exchange->ranks[rank];
        own.call = call;
        own.barriers = ++barriers;
        for (int other = 0; other < size; other++) {
            while (exchange->ranks[other].barriers < barriers) {
                if (is_aborted) return false;
                usleep(50);
            }
        }
        return !is_aborted;
    }

    void work() {
        while (true) {
            std::unique_lock lock(mutex);
            queued.wait(lock, [&] { return !queue.empty() || is_closed; });
            if (queue.empty()) return;
            auto [arguments, job] = queue.front();
            queue.pop_front();
            lock.unlock();
            if (!is_aborted) run(arguments);
            finish(job);
        }
    }

    void close() {
        std::lock_guard lock(mutex);
        is_closed = true;
        queued.notify_all();
    }

    void run(const Arguments& arguments);
    void run_with_one(const Arguments& arguments);
};

namespace {
// Reduce what all ranks have sent, in the order of the ranks. Sum is the type in which to add.
template <class T, class Sum>
void reduce(const ncclComm& comm, size_t offset, char* receive, size_t count, ncclRedOp_t op) {
    auto value = [&](int rank, size_t index) {
        const char* sent = comm.exchange->data[rank] + offset;
        return Sum(reinterpret_cast<const T*>(sent)[index]);
    };
    for (size_t index = 0; index < count; index++) {
        Sum sum = value(0, index);
        for (int rank = 1; rank < comm.size; rank++) {
            Sum other = value(rank, index);
            switch (op) {
                case ncclMax: sum = std::max(sum, other); break;
                case ncclMin: sum = std::min(sum, other); break;
                case ncclProd: sum *= other; break;
                default: sum += other;
            }
        }
        if (op == ncclAvg) sum /= Sum(comm.size);
        reinterpret_cast<T*>(receive)[index] = T(sum);
    }
}

// Reduce pieces of all ranks, which begin ``offset`` bytes after what each has sent.
void reduce(const ncclComm& comm, size_t offset, char* receive, size_t bytes,
            const Arguments& arguments) {
    auto with = [&](auto function) {
        function(comm, offset, receive, bytes / size_of(arguments.type), arguments.op);
    };
    switch (arguments.type) {
        case ncclFloat16: return with(reduce<__half, float>);
        case ncclBfloat16: return with(reduce<__nv_bfloat16, float>);
        case ncclFloat32: return with(reduce<float, float>);
        case ncclFloat64: return with(reduce<double, double>);
        case ncclInt32: return with(reduce<int32_t, int32_t>);
        case ncclInt64: return with(reduce<int64_t, int64_t>);
        case ncclInt8: return with(reduce<int8_t, int8_t>);
        case ncclUint8: return with(reduce<uint8_t, uint8_t>);
        default: say("NCCL's type %d is not simulated", arguments.type);
    }
}

// A number that is the same on all ranks if they make the same call.
uint64_t number(const Arguments& arguments) {
    uint64_t kind = uint64_t(arguments.collective) << 56 | uint64_t(arguments.type) << 48;
    return kind | uint64_t(arguments.op + arguments.root) << 40 | arguments.count;
}
}  // namespace

// Send to one other rank, or receive from it.
void ncclComm::run_with_one(const Arguments& arguments) {
    const size_t bytes = arguments.count * size_of(arguments.type);
    const bool sends = arguments.collective == Collective::SEND;
    const int sender = sends ? rank : arguments.root;
    const int receiver = sends ? arguments.root : rank;
    char* data = exchange->data[sender];
    std::atomic<int>& addressee = exchange->ranks[sender].addressee;
    auto wait_for = [&](int value) {
        while (addressee != value && !is_aborted) usleep(50);
        return !is_aborted;
    };
    for (size_t begin = 0; begin < bytes; begin += PIECE) {
        const size_t length = std::min(PIECE, bytes - begin);
        if (sends) {
            memcpy(data, arguments.send + begin, length);
            addressee = receiver + 1;
            if (!wait_for(0)) return;
        } else {
            if (!wait_for(receiver + 1)) return;
            memcpy(arguments.receive + begin, data, length);
            addressee = 0;
        }
    }
}

void ncclComm::run(const Arguments& arguments) {
    if (arguments.collective >= Collective::SEND) return run_with_one(arguments);
    const uint64_t call = number(arguments);
    const size_t bytes = arguments.count * size_of(arguments.type);
    const bool is_scattered = arguments.collective == Collective::REDUCE_SCATTER;
    const int parts = is_scattered ? size : 1;  // that each rank sends, one for each other
    const size_t most = PIECE / parts / 8 * 8;
    const bool is_root = rank == arguments.root;
    char* own = exchange->data[rank];
    for (size_t begin = 0; begin < bytes; begin += most) {
        const size_t length = std::min(most, bytes - begin);
        if (arguments.collective != Collective::BROADCAST || is_root) {
            for (int part = 0; part < parts; part++) {
                memcpy(own + part * length, arguments.send + part * bytes + begin, length);
            }
        }
        if (!barrier(call)) return;
        for (int other = 0; other < size; other++) {
            if (exchange->ranks[other].call == call) continue;
            say("ranks %d and %d make different collective calls, so both hang", rank, other);
            while (!is_aborted) usleep(1000);
            return;
        }
        char* receive = arguments.receive + begin;
        switch (arguments.collective) {
            case Collective::ALL_REDUCE: reduce(*this, 0, receive, length, arguments); break;
            case Collective::REDUCE:
                if (is_root) reduce(*this, 0, receive, length, arguments);
                break;
            case Collective::REDUCE_SCATTER:
                reduce(*this, rank * length, receive, length, arguments);
                break;
            case Collective::BROADCAST:
                memcpy(receive, exchange->data[arguments.root], length);
                break;
            case Collective::ALL_GATHER:
                for (int other = 0; other < size; other++) {
                    memcpy(receive + other * bytes, exchange->data[other], length);
                }
                break;
            default: break;  // see run_with_one
        }
        if (!barrier(call)) return;  // before anybody sends the next piece
    }
}

namespace {
ncclResult_t start(const char* name, const Arguments& arguments, ncclComm_t comm,
                   cudaStream_t stream) {
    trace("nccl %s %zu", name, arguments.count);
    for (const void* memory : {arguments.send, (const char*)arguments.receive}) {
        if (memory && arguments.count > 0 && !is_on_gpu(memory)) {
            return failed(ncclInvalidArgument, "NCCL was given memory of the host");
        }
    }
    auto job = std::make_shared<Job>();
    enqueue(stream, job);
    std::lock_guard lock(comm->mutex);
    comm->queue.emplace_back(arguments, job);
    comm->queued.notify_all();
    return ncclSuccess;
}

ncclComm* make_communicator(int rank, int size, void* exchange) {
    auto comm = new ncclComm;  // never deleted: its thread may still run
    comm->rank = rank;
    comm->size = size;
    comm->exchange = static_cast<Exchange*>(exchange);
    return comm;
}

void run_in_background(ncclComm* comm) { std::thread(&ncclComm::work, comm).detach(); }

// NCCL 2.30 refuses two ranks on one GPU, in these words.
ncclResult_t check_gpus(const ncclComm& comm) {
    const char* allowed = getenv("NCCL_MULTI_RANK_GPU_ENABLE");
    if (allowed && strcmp(allowed, "1") == 0) return ncclSuccess;
    for (int other = 0; other < comm.size; other++) {
        if (other != comm.rank && comm.exchange->ranks[other].gpu == physical_gpu()) {
            return failed(ncclInvalidUsage,
                          "Multiple Ranks are using the same GPU/Partition. Set "
                          "NCCL_MULTI_RANK_GPU_ENABLE=1 to enable this configuration.");
        }
    }
    return ncclSuccess;
}
}  // namespace

// ---- Communicators

API ncclResult_t ncclGetVersion(int* version) {
    *version = NCCL_VERSION_CODE;
    return ncclSuccess;
}

// The id is the name of the file that the ranks share.
API ncclResult_t ncclGetUniqueId(ncclUniqueId* id) {
    static std::atomic<int> count{0};
    snprintf(id->internal, sizeof id->internal, "/dev/shm/pretended_nccl_%d_%d", getpid(), count++);
    return ncclSuccess;
}

API ncclResult_t ncclCommInitRankConfig(ncclComm_t* result, int size, ncclUniqueId id, int rank,
                                        ncclConfig_t*) {
    int file = open(id.internal, O_RDWR | O_CREAT, 0600);
    if (file < 0 || ftruncate(file, sizeof(Exchange))) {
        return failed(ncclSystemError, "no shared memory");
    }
    void* memory = mmap(nullptr, sizeof(Exchange), PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
    close(file);
    ncclComm* comm = make_communicator(rank, size, memory);
    comm->exchange->ranks[rank].gpu = physical_gpu();
    comm->exchange->ranks[rank].is_here = true;
    const auto begin = std::chrono::steady_clock::now();
    for (int other = 0; other < size; other++) {
        while (!comm->exchange->ranks[other].is_here) {
            usleep(500);
            if (std::chrono::steady_clock::now() - begin > LONGEST_START) {
                return failed(ncclSystemError, "not all ranks have come");
            }
        }
    }
    comm->barrier(0);
    if (rank == 0) unlink(id.internal);
    ncclResult_t checked = check_gpus(*comm);
    if (checked != ncclSuccess) return checked;
    run_in_background(comm);
    *result = comm;
    return ncclSuccess;
}

API ncclResult_t ncclCommInitRankScalable(ncclComm_t* result, int size, int rank, int,
                                          ncclUniqueId* ids, ncclConfig_t* config) {
    return ncclCommInitRankConfig(result, size, ids[0], rank, config);
}

// For one process with several GPUs, as in DataParallel.
API ncclResult_t ncclCommInitAll(ncclComm_t* results, int size, const int*) {
    constexpr int kind = MAP_SHARED | MAP_ANONYMOUS;
    void* memory = mmap(nullptr, sizeof(Exchange), PROT_READ | PROT_WRITE, kind, -1, 0);
    for (int rank = 0; rank < size; rank++) {
        results[rank] = make_communicator(rank, size, memory);
        run_in_background(results[rank]);
    }
    return ncclSuccess;
}

API ncclResult_t ncclCommAbort(ncclComm_t comm) {
    comm->is_aborted = true;
    comm->close();
    return ncclSuccess;
}

API ncclResult_t ncclCommDestroy(ncclComm_t comm) {
    comm->close();
    return ncclSuccess;
}

API ncclResult_t ncclCommFinalize(ncclComm_t) { return ncclSuccess; }

API ncclResult_t ncclCommGetAsyncError(ncclComm_t, ncclResult_t* error) {
    *error = ncclSuccess;
    return ncclSuccess;
}

API ncclResult_t ncclCommCount(const ncclComm_t comm, int* count) {
    *count = comm->size;
    return ncclSuccess;
}

API ncclResult_t ncclCommUserRank(const ncclComm_t comm, int* rank) {
    *rank = comm->rank;
    return ncclSuccess;
}

// PyTorch registers its memory, which makes real transfers faster.
API ncclResult_t ncclCommRegister(const ncclComm_t comm, void*, size_t, void** handle) {
    *handle = comm;
    return ncclSuccess;
}

API ncclResult_t ncclCommDeregister(const ncclComm_t, void*) { return ncclSuccess; }

API const char* ncclGetLastError(ncclComm_t) { return last_error.c_str(); }

API const char* ncclGetErrorString(ncclResult_t result) {
    switch (result) {
        case ncclSuccess: return "no error";
        case ncclInvalidUsage: return "invalid usage (run with NCCL_DEBUG=WARN for details)";
        case ncclSystemError:
            return "unhandled system error (run with NCCL_DEBUG=INFO for details)";
        default: return "an error of the pretended NCCL";
    }
}

// ---- Collectives. Each communicator has its thread, so a group needs nothing of its own.

API ncclResult_t ncclGroupStart() { return ncclSuccess; }
API ncclResult_t ncclGroupEnd() { return ncclSuccess; }

API ncclResult_t ncclAllReduce(const void* send, void* receive, size_t count, ncclDataType_t type,
                               ncclRedOp_t op, ncclComm_t comm, cudaStream_t stream) {
    return start("all_reduce",
                 {Collective::ALL_REDUCE, (const char*)send, (char*)receive, count, type, op, 0},
                 comm, stream);
}

API ncclResult_t ncclReduce(const void* send, void* receive, size_t count, ncclDataType_t type,
                            ncclRedOp_t op, int root, ncclComm_t comm, cudaStream_t stream) {
    return start("reduce",
                 {Collective::REDUCE, (const char*)send, (char*)receive, count, type, op, root},
                 comm, stream);
}

API ncclResult_t ncclReduceScatter(const void* send, void* receive, size_t count,
                                   ncclDataType_t type, ncclRedOp_t op, ncclComm_t comm,
                                   cudaStream_t stream) {
    return start(
        "reduce_scatter",
        {Collective::REDUCE_SCATTER, (const char*)send, (char*)receive, count, type, op, 0}, comm,
        stream);
}

API ncclResult_t ncclBroadcast(const void* send, void* receive, size_t count, ncclDataType_t type,
                               int root, ncclComm_t comm, cudaStream_t stream) {
    return start(
        "broadcast",
        {Collective::BROADCAST, (const char*)send, (char*)receive, count, type, ncclSum, root},
        comm, stream);
}

API ncclResult_t ncclBcast(void* memory, size_t count, ncclDataType_t type, int root,
                           ncclComm_t comm, cudaStream_t stream) {
    return ncclBroadcast(memory, memory, count, type, root, comm, stream);
}

API ncclResult_t ncclAllGather(const void* send, void* receive, size_t count, ncclDataType_t type,
                               ncclComm_t comm, cudaStream_t stream) {
    return start(
        "all_gather",
        {Collective::ALL_GATHER, (const char*)send, (char*)receive, count, type, ncclSum, 0}, comm,
        stream);
}

API ncclResult_t ncclSend(const void* send, size_t count, ncclDataType_t type, int peer,
                          ncclComm_t comm, cudaStream_t stream) {
    return start("send", {Collective::SEND, (const char*)send, nullptr, count, type, ncclSum, peer},
                 comm, stream);
}

API ncclResult_t ncclRecv(void* receive, size_t count, ncclDataType_t type, int peer,
                          ncclComm_t comm, cudaStream_t stream) {
    return start("recv", {Collective::RECEIVE, nullptr, (char*)receive, count, type, ncclSum, peer},
                 comm, stream);
}
