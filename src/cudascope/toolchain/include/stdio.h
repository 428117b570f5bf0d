#pragma once
// NVRTC has printf built in
