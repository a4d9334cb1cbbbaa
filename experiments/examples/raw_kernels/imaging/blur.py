import cupy as cp

TILE = 16

box_blur_kernel = cp.RawKernel(
    r"""
#define TILE 16
extern "C" __global__
void box_blur(const float* image, float* out, int height, int width, int radius) {
    extern __shared__ float tile[];  // the block's pixels and radius more on each side
    int side = TILE + 2 * radius;
    for (int i = threadIdx.y * TILE + threadIdx.x; i < side * side; i += TILE * TILE) {
        int y = blockIdx.y * TILE + i / side - radius;
        int x = blockIdx.x * TILE + i % side - radius;
        y = min(max(y, 0), height - 1);
        x = min(max(x, 0), width - 1);
        tile[i] = image[y * width + x];
    }
    __syncthreads();

    int y = blockIdx.y * TILE + threadIdx.y;
    int x = blockIdx.x * TILE + threadIdx.x;
    if (y >= height || x >= width) return;
    float sum = 0;
    for (int dy = 0; dy <= 2 * radius; dy++)
        for (int dx = 0; dx <= 2 * radius; dx++)
            sum += tile[(threadIdx.y + dy) * side + threadIdx.x + dx];
    out[y * width + x] = sum / ((2 * radius + 1) * (2 * radius + 1));
}
""",
    "box_blur",
)


def box_blur(image, radius):
    """Mean over a square of 2 * radius + 1 pixels; the border is continued."""
    image = cp.ascontiguousarray(image, dtype=cp.float32)
    height, width = image.shape
    out = cp.empty_like(image)
    grid = ((width + TILE - 1) // TILE, (height + TILE - 1) // TILE)
    shared = (TILE + 2 * radius) ** 2 * 4
    box_blur_kernel(grid, (TILE, TILE), (image, out, height, width, radius), shared_mem=shared)
    return out
