// For `make compat` where only CUDA builds of torch can be had: from 2.14 on, torch_npu cannot be loaded beside one,
// because both register the same options of the memory allocator and torch stops on the second. Preloaded, this hands
// each caller a set of its own. Nothing here allocates on a device.
#include <string>
#include <unordered_set>

namespace c10::CachingAllocator {
struct AcceleratorAllocatorConfig {
    static std::unordered_set<std::string>& getMutableKeys();
    static const std::unordered_set<std::string>& getKeys();
};
std::unordered_set<std::string>& AcceleratorAllocatorConfig::getMutableKeys() {
    return *new std::unordered_set<std::string>;
}
const std::unordered_set<std::string>& AcceleratorAllocatorConfig::getKeys() { return getMutableKeys(); }
}  // namespace c10::CachingAllocator
