// What the files of the simulated CUDA share.
#pragma once
#include <cuda_runtime_api.h>

#include <memory>
#include <string>
#include <vector>

#define API extern "C" __attribute__((visibility("default")))

// A collective that is under way. Everything else that a stream is given is done at once.
struct Job {
    bool done = false;
    bool is_stuck = false;  // somebody has waited for it in vain
};
using Jobs = std::vector<std::shared_ptr<Job>>;

// Give a job to a stream, whose later work waits for it. finish() ends this wait.
void enqueue(cudaStream_t stream, const std::shared_ptr<Job>& job);
void finish(const std::shared_ptr<Job>& job);

// The number of the GPU that this thread uses, as the machine counts, whatever
// CUDA_VISIBLE_DEVICES is.
int physical_gpu();

bool is_on_gpu(const void* address);

// Append a line to the file PRETEND_TRACE, if that is set: this process's RANK, and the text.
void trace(const char* format, ...) __attribute__((format(printf, 1, 2)));

// Print a line for whoever runs the program.
void say(const char* format, ...) __attribute__((format(printf, 1, 2)));
