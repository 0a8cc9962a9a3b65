#!/bin/bash
chmod +x tree.sh
