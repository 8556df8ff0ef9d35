// The CUDA driver and CUPTI, as far as PyTorch cannot do without. run.py adds whatever else it
// links to: functions of CUPTI that record nothing, and others that print their name and fail.
#include <cuda.h>
#include <cupti.h>

#include "simulator.h"

bool context_exists(int gpu);

// Libraries with a CUDA runtime of their own, such as cuBLAS, find no GPU.
API CUresult cuInit(unsigned) { return CUDA_ERROR_NO_DEVICE; }

API CUresult cuDriverGetVersion(int* version) {
    *version = CUDA_VERSION;
    return CUDA_SUCCESS;
}

API CUresult cuDeviceGetCount(int* count) {
    *count = 0;
    return CUDA_ERROR_NO_DEVICE;
}

API CUresult cuDevicePrimaryCtxGetState(CUdevice gpu, unsigned* flags, int* is_active) {
    *flags = 0;
    *is_active = context_exists(gpu);
    return CUDA_SUCCESS;
}

API CUptiResult cuptiActivityGetNextRecord(uint8_t*, size_t, CUpti_Activity**) {
    return CUPTI_ERROR_MAX_LIMIT_REACHED;  // there are no more records
}

API CUptiResult cuptiActivityGetNumDroppedRecords(CUcontext, uint32_t, size_t* count) {
    *count = 0;
    return CUPTI_SUCCESS;
}

API CUptiResult cuptiGetVersion(uint32_t* version) {
    *version = CUPTI_API_VERSION;
    return CUPTI_SUCCESS;
}
